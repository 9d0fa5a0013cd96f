#[replay_block]
#[derive(Clone)]
struct World {
    by: f64,
}

// becomes

#[derive(Clone)]
struct World {
    by: f64,
}
::core::compile_error! {
    "`#[replay_block]` goes on a function, a method or an impl block; move it there"
}
