//! Methods that a trait brings along, and signatures that speak of the trait's own types and numbers.

use replay_runtime::{Rollout, replay_block};
use tch::Tensor;
use tch::nn::Module;

use crate::{scalar, value};

/// A provided method: its sibling is one too, so that a caller needs to know the trait only.
trait World {
    fn scale(&self) -> f64;

    #[replay_block]
    fn step(&self, state: &Tensor) -> Tensor {
        state * self.scale()
    }

    #[replay_block]
    fn fixed(state: &Tensor) -> Tensor
    where
        Self: Sized + Default,
    {
        state * Self::default().scale()
    }

    #[replay_block]
    fn two_steps<'m>(&'m self, rollout: &Rollout<'m>, state: &Tensor) -> Result<Tensor, replay_runtime::ReplayError> {
        let state = self.step_replay(rollout, state)?;
        self.step_replay(rollout, &state)
    }
}

#[derive(Default)]
struct Plain;

impl World for Plain {
    fn scale(&self) -> f64 {
        3.0
    }
}

#[derive(Default)]
struct Overridden;

impl World for Overridden {
    fn scale(&self) -> f64 {
        5.0
    }

    fn step(&self, state: &Tensor) -> Tensor {
        state + 10.0
    }
}

fn any<W: World>(world: &W) -> f64 {
    with_rollout!(|rollout| value(&world.step_replay(&rollout, &scalar(1.0)).unwrap()))
}

#[test]
fn a_provided_method_has_a_provided_sibling() {
    let worlds: [&dyn World; 2] = [&Plain, &Overridden];
    let outputs = with_rollout!(|rollout| worlds.map(|world| world.two_steps_replay(&rollout, &scalar(1.0)).unwrap()));
    assert_eq!(outputs.map(|output| value(&output)), [9.0, 21.0]);
    assert_eq!([any(&Plain), any(&Overridden)], [3.0, 11.0]);
    let outputs = with_rollout!(|rollout| {
        let x = scalar(1.0);
        [Plain::fixed_replay(&rollout, &x).unwrap(), Overridden::fixed_replay(&rollout, &x).unwrap()]
    });
    assert_eq!(outputs.map(|output| value(&output)), [3.0, 5.0]);
}

mod dynamics {
    use tch::Tensor;

    /// Not in scope where it is implemented.
    pub(super) trait Dynamics<'a, Noise, const N: usize> {
        type Scale: Clone + Send + 'static;
        type Output;
        type Error;

        fn step<S: Into<Self::Scale> + Clone + Send + 'static>(
            &self,
            state: &Tensor,
            noise: [Noise; N],
            scale: S,
        ) -> Self::Output
        where
            Vec<Self::Scale>: Clone;

        fn fails(&self, state: &Tensor, why: Option<Self::Error>) -> Result<Tensor, Self::Error>;
        fn borrowed(&self, state: &Tensor) -> Tensor
        where
            'a: 'a;
    }
}

struct Net<'a, T>(&'a T);

#[replay_block]
impl<'a, T: Clone + Into<f64> + Send + 'static> dynamics::Dynamics<'a, T, 2> for Net<'a, T> {
    type Scale = f64;
    type Output = (Tensor, Tensor);
    type Error = String;

    #[replay_block]
    fn step<S: Into<Self::Scale> + Clone + Send + 'static>(
        &self,
        state: &Tensor,
        #[meta] noise: [T; 2],
        #[meta] scale: S,
    ) -> Self::Output
    where
        Vec<Self::Scale>: Clone,
    {
        let [first, second] = noise;
        let state = state * scale.into() + self.0.clone().into();
        (&state + first.into(), &state + second.into())
    }

    #[replay_block]
    fn fails(&self, state: &Tensor, #[meta] why: Option<Self::Error>) -> Result<Tensor, Self::Error> {
        why.map_or_else(|| Ok(state + self.0.clone().into()), Err)
    }

    #[replay_block]
    fn borrowed(&self, state: &Tensor) -> Tensor
    where
        'a: 'a,
    {
        state - self.0.clone().into()
    }
}

mod wide {
    pub(super) trait Wide {
        const WIDTH: usize;
        fn step(&self, state: &tch::Tensor, of: [f64; 3]) -> tch::Tensor;
    }
}

struct Wide;

#[replay_block]
impl wide::Wide for Wide {
    const WIDTH: usize = 3;

    fn step(&self, state: &Tensor, #[meta] of: [f64; Self::WIDTH]) -> Tensor {
        state + of[2]
    }
}

#[test]
fn the_types_and_numbers_of_a_trait_are_found() {
    let by = 1.0_f32;
    let net = Net(&by);
    with_rollout!(|rollout| {
        let x = scalar(2.0);
        let (first, second) = net.step_replay(&rollout, &x, [1.0, 2.0], 10.0_f32).unwrap();
        let third = net.fails_replay(&rollout, &x, None).unwrap();
        let fourth = net.borrowed_replay(&rollout, &x).unwrap();
        let fifth = Wide.step_replay(&rollout, &x, [0.0, 0.0, 5.0]).unwrap();
        assert_eq!([first, second, third, fourth, fifth].map(|it| value(&it)), [22.0, 23.0, 3.0, 1.0, 7.0]);
        let error = net.fails_replay(&rollout, &x, Some("by order".to_owned())).unwrap_err();
        assert!(error.to_string().contains("`Net::fails`") && error.to_string().contains("by order"), "{error}");
    });
}

/// One name in two impls of one type.
#[derive(Debug)]
struct Scaled<T>(T);

#[replay_block]
impl Module for Scaled<f32> {
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs * f64::from(self.0)
    }
}

#[replay_block]
impl Module for Scaled<f64> {
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs * -self.0
    }
}

impl Scaled<i32> {
    #[replay_block]
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs + f64::from(self.0)
    }
}

#[test]
fn one_name_in_several_impls_is_several_blocks() {
    let (first, second, third) = (Scaled(2.0_f32), Scaled(2.0_f64), Scaled(2));
    let outputs = with_rollout!(|rollout| {
        let x = scalar(3.0);
        [
            first.forward_replay(&rollout, &x).unwrap(),
            second.forward_replay(&rollout, &x).unwrap(),
            third.forward_replay(&rollout, &x).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [6.0, -6.0, 5.0]);
}

/// A trait object and a lifetime without a name as the type of the impl.
trait Shift: std::fmt::Debug + Send {
    fn by(&self) -> f64;
}

impl Shift for Scaled<f64> {
    fn by(&self) -> f64 {
        self.0
    }
}

#[replay_block]
impl Module for dyn Shift {
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs + self.by()
    }
}

#[derive(Debug)]
struct View<'a>(&'a f64);

#[replay_block]
impl Module for View<'_> {
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs + *self.0
    }
}

#[test]
fn any_type_of_the_crate_can_hold_the_sibling() {
    let scaled = Scaled(4.0);
    let (object, view): (&dyn Shift, _) = (&scaled, View(&0.5));
    let outputs = with_rollout!(|rollout| {
        let x = scalar(1.0);
        [object.forward_replay(&rollout, &x).unwrap(), view.forward_replay(&rollout, &x).unwrap()]
    });
    assert_eq!(outputs.map(|output| value(&output)), [5.0, 1.5]);
}
