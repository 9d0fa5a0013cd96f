//! Guarantee *no grad*, *modes* and *errors*, for what is printed: nothing. LibTorch warns on the process's own
//! standard error, so each program here runs in a process of its own, whose output is read.

use std::process::Command;

use replay_runtime::{AutocastGuard, Rollout};
use replay_tests::{Setup, randn};
use tch::{Device, Kind, Tensor, nn};

/// Which program a process is to run.
const PROGRAM: &str = "REPLAY_TESTS_QUIET";

fn step(rollout: &Rollout<'_>, model: &nn::Linear, x: &Tensor) -> Tensor {
    let (ws, bs) = (model.ws.shallow_clone(), model.bs.as_ref().unwrap().shallow_clone());
    rollout.block("step", &[("x", x)], move |_, i| i[0].matmul(&ws.tr()) + &bs).unwrap()
}

fn setup() -> (Setup<nn::Linear>, Tensor) {
    let setup = Setup::new(|path| nn::linear(path, 6, 6, nn::LinearConfig::default()));
    (setup, randn(2, &[5, 6], Kind::Float))
}

fn train(setup: &Setup<nn::Linear>, x: &Tensor) {
    let rollout = Rollout::new(&setup.vs);
    let h = step(&rollout, &setup.model, &step(&rollout, &setup.model, x).dropout(0.5, true));
    rollout.backward(&h.to_kind(Kind::Float).sum(Kind::Float)).unwrap();
}

/// What must print nothing, by name.
const PROGRAMS: [(&str, fn()); 5] = [
    ("a backward pass without autocast", || {
        let (setup, x) = setup();
        train(&setup, &x);
        train(&setup, &x);
    }),
    ("autocast, on and off", || {
        let (setup, x) = setup();
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = AutocastGuard::new(Device::Cpu, kind);
            train(&setup, &x);
            let _disabled = AutocastGuard::disabled(Device::Cpu);
            train(&setup, &x);
        }
        train(&setup, &x);
    }),
    ("no grad", || {
        let (setup, x) = setup();
        let rollout = Rollout::new(&setup.vs);
        let y = tch::no_grad(|| step(&rollout, &setup.model, &x.set_requires_grad(true)));
        assert!(!y.requires_grad());
        assert!(!step(&Rollout::inference(), &setup.model, &y).requires_grad());
    }),
    ("nothing trainable", || {
        let (mut setup, x) = setup();
        setup.vs.freeze();
        let rollout = Rollout::new(&setup.vs);
        assert!(!step(&rollout, &setup.model, &x).requires_grad());
    }),
    ("errors and refusals", || {
        let (setup, x) = setup();
        let rollout = Rollout::new(&setup.vs);
        rollout.block("errs", &[("x", &x)], |_, i| i[0].f_matmul(&i[0])).unwrap_err();
        let loss = step(&rollout, &setup.model, &x).sum(Kind::Float);
        loss.f_backward().unwrap_err();
        assert!(Rollout::new(&setup.vs).backward(&loss).is_err());
        drop(rollout);
        drop(loss);
    }),
];

/// Does nothing unless a process was started for it.
#[test]
fn runs_in_a_process_of_its_own() {
    let Ok(wanted) = std::env::var(PROGRAM) else { return };
    let (_, program) = PROGRAMS.iter().find(|(name, _)| *name == wanted).expect("one of the programs");
    println!("started");
    program();
    println!("ended");
}

/// What a process that runs the program writes, its own two words and the test harness's left out.
fn output_of(name: &str) -> String {
    let own = std::env::current_exe().expect("this test knows where it is");
    let arguments = ["--exact", "runs_in_a_process_of_its_own", "--nocapture", "--quiet"];
    let output = Command::new(own).args(arguments).env(PROGRAM, name).output().expect("it runs");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}:\n{out}\n{err}");
    let between = out.split("started\n").nth(1).and_then(|rest| rest.split("ended\n").next());
    format!("{}{err}", between.unwrap_or_else(|| panic!("{name} did not run:\n{out}")))
}

#[test]
fn nothing_is_printed() {
    for (name, _) in PROGRAMS {
        assert_eq!(output_of(name), "", "printed by: {name}");
    }
}

/// The check can fail: LibTorch's warnings arrive where it looks.
#[test]
fn a_warning_would_be_seen() {
    let Ok(wanted) = std::env::var(PROGRAM) else {
        let own = std::env::current_exe().unwrap();
        let arguments = ["--exact", "a_warning_would_be_seen", "--nocapture"];
        let output = Command::new(own).args(arguments).env(PROGRAM, "warn").output().unwrap();
        assert!(String::from_utf8_lossy(&output.stderr).contains("Warning"), "{output:?}");
        return;
    };
    assert_eq!(wanted, "warn");
    let inner = Tensor::from(1f32).set_requires_grad(true).exp();
    assert!(!inner.grad().defined());
}
