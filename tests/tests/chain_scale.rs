//! Chains: guarantees *memory*, *depth* and *threads*, where steps run again for their states.

use std::cell::Cell;

use replay_runtime::{BlockOptions, Chain, Check, Rollout};
use replay_tests::Setup;
use tch::{Device, Kind, Tensor, nn};

fn weight() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[3], nn::Init::Const(0.9)))
}

/// A state's elements, and its size: so large that the allocator gives each back to the system at once.
const LARGE: i64 = 10 << 20;
const LARGE_MIB: i64 = 40;

/// Resident memory of this process in MiB.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux tells");
    let pages: i64 = statm.split_whitespace().nth(1).expect("the second field").parse().expect("a number");
    pages * 4 / 1024
}

/// One step's states from its own.
type Step = fn(&Tensor, &[Tensor]) -> (Tensor, Tensor);

/// The most large tensors that bodies of a chain saw beside its first state, with graphs of forwards filled again by replays that
/// end early, or built anew.
fn peak(steps: usize, slots: usize, early_stop: bool, step: Step) -> usize {
    let setup = Setup::new(|path| path.var("w", &[1], nn::Init::Const(0.9)));
    let start = Tensor::ones([LARGE], (Kind::Float, Device::Cpu));
    let (before, peak) = (resident(), Cell::new(0));
    let rollout = Rollout::new(&setup.vs);
    let chain = Chain::new(BlockOptions::new("step").early_stop(early_stop), steps).slots(slots);
    let (last, sum) = rollout
        .chain(chain, &[("x", &start), ("sum", &Tensor::from(0f32))], |_, _, states| {
            let next = step(&setup.model, states);
            peak.set(peak.get().max(resident() - before));
            next
        })
        .unwrap();
    let loss = last.mean(Kind::Float) + sum;
    drop(last);
    rollout.backward(&loss).unwrap();
    assert!((resident() - before).abs() < LARGE_MIB / 2, "everything is freed");
    usize::try_from((peak.get() + LARGE_MIB / 2) / LARGE_MIB).expect("memory has grown")
}

fn multiply(w: &Tensor, states: &[Tensor]) -> (Tensor, Tensor) {
    (&states[0] * w, &states[1] + w)
}

/// Beside the other stored states there are the one that a step starts from and the one that it makes, and a gradient.
#[test]
fn memory_is_that_of_the_slots_however_many_steps_there_are() {
    for slots in [1, 3] {
        for steps in [5, 8] {
            assert_eq!(peak(steps, slots, false, multiply), slots - 1 + 3, "{steps} steps with {slots} slots");
        }
    }
    assert!(peak(8, 8, false, multiply) >= 8);
}

/// A graph that waits holds no state, whether it has anything to wait for or not.
#[test]
fn nor_do_recorded_graphs_hold_states() {
    let saves_nothing: Step = |w, states| (&states[0] + w, &states[1] + w);
    let keeps_aside: Step = |w, states| (states[0].detach() + w, &states[1] + w);
    for step in [multiply, saves_nothing, keeps_aside] {
        for steps in [5, 8] {
            let [built, recorded] = [false, true].map(|early_stop| peak(steps, 2, early_stop, step));
            assert!(
                recorded <= built,
                "{steps} steps: {recorded} large tensors, {built} with graphs that are built anew"
            );
        }
    }
}

/// On two MiB of stack, forward and backward, and dropped after the forward.
#[test]
fn thousands_of_steps() {
    let test = || {
        let (setup, bias) = (weight(), 0.1);
        let body = |_: &Rollout<'_>, _: i64, x: &[Tensor]| (&x[0] * &setup.model).tanh() + bias;
        let x = Tensor::from(1f32);
        let rollout = Rollout::new(&setup.vs);
        let last = rollout.chain(Chain::new("step", 5000).slots(3), &[("x", &x)], body).unwrap();
        let total = rollout.backward(&last.sum(Kind::Float)).unwrap().total;
        // 30 * 5000 - C(33, 29) in all, and of these the forward's.
        assert_eq!([total.forwards, total.advances, total.replays], [5000, 150_000 - 40_920 - 4999, 5000]);
        let rollout = Rollout::new(&setup.vs);
        drop(rollout.chain(Chain::new("step", 10_000).slots(300), &[("x", &x)], body).unwrap());
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(test).expect("a thread").join().expect("the test passes");
}

/// Draws of two threads' steps come between each other, and each step that runs again draws its own.
#[test]
fn chains_of_two_threads_draw_in_order() {
    let run = |scale: f64| {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().var("w", &[3], nn::Init::Const(0.9));
        let x = Tensor::ones([3], (Kind::Float, Device::Cpu)) * scale;
        for _ in 0..20 {
            let rollout = Rollout::builder(&vs).check(Check::Values).build();
            let chain = Chain::new("step", 12).slots(2);
            let last = rollout.chain(chain, &[("x", &x)], |_, _, x| (&x[0] * &w).dropout(0.5, true).tanh()).unwrap();
            rollout.backward(&last.sum(Kind::Float)).expect("no draw is another thread's");
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run(1.0));
        scope.spawn(|| run(2.0));
    });
}
