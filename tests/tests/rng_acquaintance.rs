//! Guarantee *RNG*, when a second thread with rollouts comes: the first one hears of it wherever it is.
//!
//! One test after the other: each needs a process in which its thread alone has had a rollout.

use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use replay_runtime::{Rollout, is_replaying};
use replay_tests::same_bits;
use tch::{Device, Kind, Tensor, nn};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Runs `body` on a thread of its own, which has ended when this returns.
fn alone(body: impl FnOnce() + Send) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    thread::scope(|scope| scope.spawn(body).join().unwrap());
}

/// Runs `body` while another thread has a rollout.
fn beside_a_rollout(body: impl FnOnce()) {
    let (quit, wait) = mpsc::channel::<()>();
    let (ready, is_ready) = mpsc::channel::<()>();
    let other = thread::spawn(move || {
        let vs = nn::VarStore::new(Device::Cpu);
        let _rollout = Rollout::new(&vs);
        ready.send(()).unwrap();
        let _ = wait.recv();
    });
    is_ready.recv().unwrap();
    body();
    drop(quit);
    other.join().unwrap();
}

fn ones() -> Tensor {
    Tensor::ones([8], CPU).set_requires_grad(true)
}

fn draw(x: &Tensor) -> (Tensor, Tensor) {
    let mask = Tensor::rand([8], CPU);
    (x * &mask, mask)
}

/// The second thread comes between forward and backward, so this one hears of it in the middle of a backward pass.
#[test]
fn a_thread_that_hears_of_another_in_its_backward_pass_has_its_draws_noticed_afterwards() {
    alone(|| {
        let vs = nn::VarStore::new(Device::Cpu);
        let rollout = Rollout::new(&vs);
        let y = rollout.block("quiet", &[("x", &ones())], |_, i| i[0].sin()).unwrap();
        beside_a_rollout(|| {
            rollout.backward(&y.sum(Kind::Float)).unwrap();
            let x = ones();
            let rollout = Rollout::new(&vs);
            let (y, mask): (Tensor, Tensor) = rollout.block("draws", &[("x", &x)], |_, i| draw(&i[0])).unwrap();
            rollout.backward(&y.sum(Kind::Float)).unwrap();
            assert!(same_bits(&x.grad(), &mask));
        });
    });
}

/// A thread that made a rollout while it was alone draws outside of blocks while another's block draws.
#[test]
fn draws_outside_of_blocks_wait_for_a_block_too() {
    alone(|| {
        let vs = nn::VarStore::new(Device::Cpu);
        drop(Rollout::new(&vs));
        let (begun, has_begun) = mpsc::channel::<()>();
        let (drawn, has_drawn) = mpsc::channel::<()>();
        let other = thread::spawn(move || {
            let vs = nn::VarStore::new(Device::Cpu);
            let x = ones();
            let rollout = Rollout::new(&vs);
            let outcome = rollout.block("draws", &[("x", &x)], |_, i| {
                let mask = Tensor::rand([8], CPU);
                if !is_replaying() {
                    begun.send(()).unwrap();
                    assert!(
                        has_drawn.recv_timeout(Duration::from_millis(200)).is_err(),
                        "the other thread did not wait"
                    );
                }
                let (y, second) = draw(&(&i[0] * &mask));
                (y, mask * second)
            });
            let (y, mask): (Tensor, Tensor) = outcome.unwrap();
            rollout.backward(&y.sum(Kind::Float)).unwrap();
            assert!(same_bits(&x.grad(), &mask));
        });
        has_begun.recv().unwrap();
        let _ = Tensor::rand([100], CPU);
        let _ = drawn.send(());
        other.join().unwrap();
    });
}
