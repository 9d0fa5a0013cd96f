//! Guarantee *errors*: `Display` is one or two lines that name the block and the input and say what to do. LibTorch's
//! long text with its C++ frames stays behind `source()` and `Debug`.
//!
//! Not reached here: `InferenceInput` (tch cannot make such a tensor; see `replay-runtime/src/modes_tests.rs`),
//! `Device` (needs two CUDA devices, see `devices.rs`), `Version` (needs another LibTorch), `Thread` (the engine always
//! comes back to the rollout's own thread), `ForeignBackward` (such a pass is tch's own and so is its error; the text
//! is checked below), `Context` and `Torch`.

use std::cell::RefCell;
use std::error::Error;

use replay_runtime::{ReplayError, Rollout, cuda, is_replaying};
use replay_tests::{Setup, randn};
use tch::{Kind, Tensor, nn, nn::Module};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn setup() -> Setup<nn::Linear> {
    Setup::new(linear)
}

fn x() -> Tensor {
    randn(2, &[5, 6], Kind::Float)
}

/// Demands of an error's text what this guarantee says, and that all of `names` occur in it.
fn assert_clear(error: &ReplayError, names: &[&str]) {
    let text = error.to_string();
    assert!((1..=2).contains(&text.lines().count()), "{} lines: {text}", text.lines().count());
    assert!(!has_frames(&text), "{text}");
    for name in names {
        assert!(text.contains(name), "no {name} in: {text}");
    }
    assert!(!format!("{error:?}").is_empty());
}

fn has_frames(text: &str) -> bool {
    ["frame #", "Exception raised", "most recent call"].iter().any(|sign| text.contains(sign))
}

/// Two matrices that cannot be multiplied.
fn misfit() -> Result<Tensor, tch::TchError> {
    x().f_matmul(&x())
}

/// The error of one block's forward.
fn forward(body: impl Fn(&nn::Linear, &[Tensor]) -> Result<Tensor, tch::TchError>) -> ReplayError {
    let setup = setup();
    let model = &setup.model;
    let body = &body;
    let rollout = Rollout::new(&setup.vs);
    rollout.block("pump", &[("flow", &x())], |_, i| body(model, i)).unwrap_err()
}

/// The error of one block's replay, after `between`.
fn replay(
    body: impl Fn(&nn::Linear, &[Tensor]) -> Result<Tensor, tch::TchError>,
    between: impl Fn(&nn::Linear, &mut Tensor),
) -> ReplayError {
    let setup = setup();
    let (model, mut x) = (&setup.model, x());
    let body = &body;
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("pump", &[("flow", &x)], |_, i| body(model, i)).unwrap();
    between(model, &mut x);
    rollout.backward(&y.sum(Kind::Float)).unwrap_err()
}

#[expect(clippy::unnecessary_wraps, reason = "stands where a body that fails could stand")]
fn good(model: &nn::Linear, i: &[Tensor]) -> Result<Tensor, tch::TchError> {
    Ok(model.forward(&i[0]).tanh())
}

/// `good` in the forward, `bad` in the replay.
fn turn<T>(good: T, bad: T) -> T {
    if is_replaying() { bad } else { good }
}

#[test]
fn an_error_of_tch_in_a_body_is_told_in_its_first_line() {
    let errors = [forward(|_, _| misfit()), replay(|model, i| turn(good(model, i), misfit()), |_, _| {})];
    for (error, pass) in errors.iter().zip(["forward", "replay"]) {
        assert!(matches!(error, ReplayError::Block { .. }));
        assert_clear(error, &["`pump`", pass, "shapes cannot be multiplied"]);
        let source = error.source().expect("the body's error").downcast_ref::<tch::TchError>().expect("as it was");
        assert!(has_frames(&source.to_string()), "all of it is kept");
    }
}

#[test]
fn an_error_of_the_users_own_comes_back_as_the_source() {
    let setup = setup();
    let rollout = Rollout::new(&setup.vs);
    let result = rollout.block("pump", &[("flow", &x())], |_, _| -> Result<Tensor, _> {
        Err(std::io::Error::other("the pump is dry"))
    });
    let error = result.unwrap_err();
    assert_clear(&error, &["`pump`", "the pump is dry"]);
    assert!(error.source().unwrap().is::<std::io::Error>());
}

#[test]
fn an_error_of_an_inner_block_names_both() {
    let setup = setup();
    let rollout = Rollout::new(&setup.vs);
    let result = rollout
        .block("plant", &[("flow", &x())], |rollout, i| rollout.block("pump", &[("flow", &i[0])], |_, _| misfit()));
    assert_clear(&result.unwrap_err(), &["`plant`", "`pump`", "shapes cannot be multiplied"]);
}

#[test]
fn what_is_no_input() {
    let setup = setup();
    let rollout = Rollout::new(&setup.vs);
    let error = rollout.block("pump", &[], |_, _| x()).unwrap_err();
    assert!(matches!(error, ReplayError::NoInput { .. }));
    assert_clear(&error, &["`pump`"]);
    let error = rollout.block("pump", &[("flow", &x()), ("heat", &Tensor::new())], |_, _| x()).unwrap_err();
    assert!(matches!(error, ReplayError::UndefinedInput { .. }));
    assert_clear(&error, &["`pump`", "`heat`"]);
}

#[test]
fn what_is_no_output() {
    let error = forward(|_, _| Ok(Tensor::new()));
    assert!(matches!(error, ReplayError::UndefinedOutput { output: 0, .. }));
    assert_clear(&error, &["`pump`", "output 0"]);
    let error = replay(|model, i| turn(good(model, i), Ok(Tensor::new())), |_, _| {});
    assert!(matches!(error, ReplayError::UndefinedOutput { output: 0, .. }));
    assert_clear(&error, &["`pump`", "output 0"]);
}

#[test]
fn what_a_forward_may_not_write() {
    let error = forward(|_, i| Ok(tch::no_grad(|| i[0].shallow_clone().g_add_scalar_(1.0))));
    assert!(matches!(error, ReplayError::InputWritten { .. }));
    assert_clear(&error, &["`pump`", "`flow`"]);
    let error = forward(|model, i| {
        let _ = tch::no_grad(|| model.ws.shallow_clone().g_add_scalar_(1.0));
        good(model, i)
    });
    assert!(matches!(error, ReplayError::VariableWritten { .. }));
    assert_clear(&error, &["`pump`", "`weight`"]);
}

#[test]
fn what_a_body_may_not_use() {
    let outside = x().set_requires_grad(true).exp();
    let error = forward(|_, i| Ok(&i[0] * &outside));
    assert!(matches!(error, ReplayError::Captured { .. }));
    assert_clear(&error, &["`pump`", "ExpBackward0", "input"]);
}

#[test]
fn what_may_not_change_before_the_replay() {
    let error = replay(good, |_, x| drop(x.g_add_scalar_(1.0)));
    assert!(matches!(error, ReplayError::InputChanged { .. }));
    assert_clear(&error, &["`pump`", "`flow`"]);
    let error = replay(good, |model, _| drop(tch::no_grad(|| model.ws.shallow_clone().g_add_scalar_(1.0))));
    assert!(matches!(error, ReplayError::VariableChanged { .. }));
    assert_clear(&error, &["`pump`", "`weight`", "values"]);
}

#[test]
fn what_a_replay_may_not_do_otherwise() {
    let draw = |size| Tensor::rand([size], (Kind::Float, tch::Device::Cpu)).sum(Kind::Float);
    let error = replay(|model, i| Ok(good(model, i)? + draw(turn(1, 2))), |_, _| {});
    assert!(matches!(error, ReplayError::RngDiverged { .. }), "{error}");
    assert_clear(&error, &["`pump`", "Cpu"]);
    let error = replay(|model, i| Ok(good(model, i)?.narrow(0, 0, turn(5, 4))), |_, _| {});
    assert!(matches!(error, ReplayError::OutputMismatch { .. }), "{error}");
    assert_clear(&error, &["`pump`", "output 0", "[5, 6]", "[4, 6]"]);
}

#[test]
fn what_is_no_loss() {
    let setup = setup();
    let error = Rollout::new(&setup.vs).backward(&x()).unwrap_err();
    assert!(matches!(error, ReplayError::LossNotScalar { .. }));
    assert_clear(&error, &["[5, 6]"]);
    let error = Rollout::new(&setup.vs).backward(&x().sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::LossWithoutGrad));
    assert_clear(&error, &["trainable"]);
    let error = Rollout::inference().backward(&x().sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::Inference));
    assert_clear(&error, &["Rollout::new"]);
    let error = Rollout::new(&setup.vs).backward(&Tensor::new()).unwrap_err();
    assert_clear(&error, &["the loss"]);
}

#[test]
fn whose_block_it_is_not() {
    let setup = setup();
    let (first, second) = (Rollout::new(&setup.vs), Rollout::new(&setup.vs));
    let y = first.block("pump", &[("flow", &x())], |_, i| setup.model.forward(&i[0])).unwrap();
    let error = second.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::OtherRollout { .. }));
    assert_clear(&error, &["`pump`", "another rollout"]);
}

/// tch hands the refusal on as it is.
#[test]
fn a_plain_backward_pass_says_what_to_call_instead() {
    let setup = setup();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("pump", &[("flow", &x())], |_, i| setup.model.forward(&i[0])).unwrap();
    let text = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(text.contains("`pump`") && text.contains("rollout.backward(&loss)"), "{text}");
    assert!(!has_frames(&text) && text.lines().count() <= 2, "{text}");
}

/// A body that reaches for an earlier output in its replay runs that block before its turn.
#[test]
fn a_block_that_was_replayed_already() {
    let setup = setup();
    let model = &setup.model;
    let stash = RefCell::new(None);
    let rollout = Rollout::new(&setup.vs);
    let first = rollout.block("pump", &[("flow", &x())], |_, i| model.forward(&i[0])).unwrap();
    let second = rollout
        .block("thief", &[("flow", &x())], |_, i| {
            let own = model.forward(&i[0]);
            stash.borrow().as_ref().map_or_else(|| own.shallow_clone(), |stolen| &own + stolen)
        })
        .unwrap();
    stash.replace(Some(first.shallow_clone()));
    let error = rollout.backward(&(first + second).sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::Used { .. }), "{error}");
    assert_clear(&error, &["`pump`"]);
}

#[test]
fn a_fault_around_the_blocks_is_libtorchs_in_one_line() {
    let setup = setup();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("pump", &[("flow", &x())], |_, i| setup.model.forward(&i[0])).unwrap();
    let mut z = y.exp();
    let loss = z.square().sum(Kind::Float);
    let _ = tch::no_grad(|| z.zero_());
    let error = rollout.backward(&loss).unwrap_err();
    assert!(matches!(error, ReplayError::Backward { .. }));
    assert_clear(&error, &["modified by an inplace operation"]);
    let source = error.source().expect("LibTorch's report");
    assert!(!has_frames(&source.to_string()));
    assert!(has_frames(&format!("{source:?}")) && has_frames(&format!("{error:?}")));
}

#[test]
fn missing_cuda() {
    if let Err(error) = cuda::load() {
        assert_clear(&error, &["CUDA"]);
    }
}

#[test]
fn an_error_can_be_sent_and_boxed() {
    fn assert_sendable<T: Error + Send + Sync + 'static>(_: &T) {}
    let error = forward(|_, _| misfit());
    assert_sendable(&error);
    let boxed: Box<dyn Error + Send + Sync> = error.into();
    assert!(boxed.is::<ReplayError>());
}

/// What `unwrap` and a `main` that returns the error print: the message, not its parts.
#[test]
fn debug_starts_with_the_message() {
    let error = replay(|model, i| turn(good(model, i), misfit()), |_, _| {});
    let text = format!("{error:?}");
    assert!(text.starts_with(&error.to_string()), "{text}");
    assert!(has_frames(&text), "and all of the source behind it");
}
