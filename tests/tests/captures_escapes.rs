//! Guarantee *captures*, for what leaves a body by the way: its gradient would end at the block's own copy of the
//! input, so every backward pass that comes to it is an error that names block and input, whoever calls it.

use std::cell::RefCell;

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::{Setup, randn, same_bits};
use tch::{Kind, Tensor, nn};

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[6], nn::Init::Const(0.5)))
        .leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
}

/// A block that leaves the sine of its input times the weight in `aside`.
fn leaks<'m>(rollout: &Rollout<'m>, setup: &'m Setup<Tensor>, aside: &'m RefCell<Option<Tensor>>) -> Tensor {
    let body = |_: &Rollout<'_>, i: &[Tensor]| {
        aside.replace(Some((i[0].sin() * &setup.model).sum(Kind::Float)));
        &i[0] * &setup.model
    };
    rollout.block("leaks", &[("state", &setup.leaves[0].1)], body).unwrap()
}

#[track_caller]
fn assert_escaped(text: &str) {
    assert!(text.contains("`leaks`") && text.contains("`state`") && text.contains("did not return"), "{text}");
}

fn assert_untrained(setup: &Setup<Tensor>) {
    assert!(setup.grads().values().all(Option::is_none));
}

#[test]
fn a_plain_backward_pass_is_an_error() {
    let (setup, aside) = (setup(), RefCell::default());
    let rollout = Rollout::new(&setup.vs);
    let y = leaks(&rollout, &setup, &aside);
    let stolen = aside.take().unwrap();
    assert_escaped(&stolen.f_backward().unwrap_err().to_string());
    assert!(!setup.leaves[0].1.grad().defined());

    // The rollout's own pass is none the worse.
    for mut variable in setup.vs.trainable_variables() {
        variable.zero_grad();
    }
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert!(setup.model.grad().defined() && setup.leaves[0].1.grad().defined());
}

/// As part of its loss, or as an input of its block.
#[test]
fn the_backward_pass_of_another_rollout_is_an_error() {
    for as_input in [false, true] {
        let (setup, aside) = (setup(), RefCell::default());
        let rollout = Rollout::new(&setup.vs);
        let _y = leaks(&rollout, &setup, &aside);
        let stolen = aside.take().unwrap();
        let other = Rollout::new(&setup.vs);
        let loss = if as_input {
            other.block("other", &[("stolen", &stolen)], |_, i| i[0].exp() * setup.model.get(0)).unwrap()
        } else {
            stolen
        };
        assert_escaped(&format!("{:?}", other.backward(&loss).unwrap_err()));
        assert_untrained(&setup);
    }
}

/// A block of another rollout inside the body takes the input with it.
#[test]
fn a_block_of_another_rollout_inside_the_body_is_an_error() {
    let (setup, aside) = (setup(), RefCell::new(None));
    let other = Rollout::new(&setup.vs);
    let rollout = Rollout::new(&setup.vs);
    let body = |_: &Rollout<'_>, i: &[Tensor]| {
        let side = other.block("side", &[("x", &i[0])], |_, i| (&i[0] * &setup.model).sum(Kind::Float)).unwrap();
        aside.replace(Some(side));
        &i[0] * &setup.model
    };
    let _y = rollout.block("leaks", &[("state", &setup.leaves[0].1)], body).unwrap();
    drop(rollout);
    let loss = aside.take().unwrap();
    assert_escaped(&format!("{:?}", other.backward(&loss).unwrap_err()));
    assert_untrained(&setup);
}

/// What an inner block leaves aside the outer one returns: in the outer's replay it would have no way back to the
/// outer's input, and already in its forward that can be seen.
#[test]
fn what_an_inner_block_leaves_aside_for_the_outer_one_is_an_error() {
    let (setup, aside) = (setup(), RefCell::new(None));
    let (w, aside) = (&setup.model, &aside);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("outer", &[("x", &setup.leaves[0].1)], |rollout, i| {
        let y = rollout.block("leaks", &[("state", &i[0])], move |_, i| {
            aside.replace(Some(i[0].sin()));
            &i[0] * w
        })?;
        Ok::<_, ReplayError>(y + aside.take().expect("left there"))
    });
    assert_escaped(&format!("{:?}", y.unwrap_err()));
    assert_untrained(&setup);
}

/// The last run is the replay: what it left aside is no better.
#[test]
fn what_a_replay_leaves_aside_is_an_error_too() {
    let (setup, aside) = (setup(), RefCell::default());
    let rollout = Rollout::new(&setup.vs);
    let y = leaks(&rollout, &setup, &aside);
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    let before = setup.leaves[0].1.grad().copy();
    let text = aside.take().unwrap().f_backward().unwrap_err().to_string();
    assert!(text.contains("`leaks`") && text.contains("did not return"), "{text}");
    assert!(same_bits(&before, &setup.leaves[0].1.grad()));
}

/// A later replay that takes up what an earlier one has left aside.
#[test]
fn what_one_replay_leaves_aside_for_another_is_an_error() {
    let (setup, aside) = (setup(), RefCell::new(None));
    let rollout = Rollout::new(&setup.vs);
    let takes = |_: &Rollout<'_>, i: &[Tensor]| {
        let y = &i[0] * &setup.model;
        if is_replaying() { y + aside.take().expect("the other block was replayed before") } else { y }
    };
    let h = rollout.block("takes", &[("x", &setup.leaves[0].1)], takes).unwrap();
    let y = leaks(&rollout, &setup, &aside);
    let error = rollout.backward(&(h.sum(Kind::Float) + y.sum(Kind::Float))).unwrap_err();
    let text = format!("{error:?}");
    assert!(text.contains("`leaks`") && text.contains("did not return"), "{text}");
    assert_untrained(&setup);
}

/// A gradient that does not go by the input is right: LibTorch does not come to it.
#[test]
fn a_gradient_of_the_weight_alone_is_right() {
    let (setup, aside) = (setup(), RefCell::default());
    let rollout = Rollout::new(&setup.vs);
    let _y = leaks(&rollout, &setup, &aside);
    let stolen = aside.take().unwrap();
    let found = Tensor::run_backward(&[stolen], &[&setup.model], false, false).remove(0);
    let expected = setup.leaves[0].1.detach().sin().sum_dim_intlist(0i64, false, Kind::Float);
    assert!(same_bits(&expected, &found));
}

/// Inside the body, while it runs, the input is a leaf like any other.
#[test]
fn a_body_may_differentiate_by_its_input_and_keep_the_graph_until_the_next_run() {
    let (setup, aside) = (setup(), RefCell::new(None));
    let (w, aside) = (&setup.model, &aside);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("force", &[("x", &setup.leaves[0].1)], move |_, i| {
        let energy = i[0].square().sum(Kind::Float);
        let force = Tensor::run_backward(&[&energy], &[&i[0]], true, true).remove(0);
        aside.replace(Some(energy));
        force * w
    });
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    let expected = (setup.leaves[0].1.detach() * 2.0).sum_dim_intlist(0i64, false, Kind::Float);
    assert!(setup.model.grad().allclose(&expected, 1e-6, 1e-6, false));
    assert!(setup.leaves[0].1.grad().equal(&setup.leaves[0].1.full_like(1.0)));
}

/// However the body ends: without an output that requires grad, with an error, with a panic.
#[test]
fn what_is_left_aside_by_a_body_that_records_nothing_is_an_error_too() {
    for how in 0..3 {
        let (setup, aside) = (setup(), RefCell::default());
        let rollout = Rollout::new(&setup.vs);
        let run = || {
            rollout.block("leaks", &[("state", &setup.leaves[0].1)], |_, i| {
                aside.replace(Some((i[0].sin() * &setup.model).sum(Kind::Float)));
                assert!(how < 2, "as asked");
                if how == 1 { Err("as asked") } else { Ok(i[0].detach()) }
            })
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        assert_eq!(outcome.is_err(), how == 2);
        let stolen = aside.take().unwrap();
        assert_escaped(&stolen.f_backward().unwrap_err().to_string());
        assert_escaped(&rollout.backward(&stolen).unwrap_err().to_string());
        assert!(!setup.leaves[0].1.grad().defined());
    }
}

/// The body's own copy of the input, kept without any graph.
#[test]
fn an_input_that_is_kept_is_refused_whoever_differentiates() {
    let (setup, kept) = (setup(), RefCell::default());
    let rollout = Rollout::new(&setup.vs);
    let keeps = |_: &Rollout<'_>, i: &[Tensor]| {
        kept.replace(Some(i[0].shallow_clone()));
        &i[0] * &setup.model
    };
    let y = rollout.block("leaks", &[("state", &setup.leaves[0].1)], keeps).unwrap();
    let kept_before: Tensor = kept.borrow().as_ref().unwrap().shallow_clone();
    assert_escaped(&kept_before.sin().sum(Kind::Float).f_backward().unwrap_err().to_string());
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    // The replay has left its own copy.
    let text = kept.take().unwrap().sin().sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(text.contains("`leaks`") && text.contains("did not return"), "{text}");
}
