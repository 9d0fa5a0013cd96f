//! The forecaster: one gated recurrent step a month, with noise of its own for every member of the ensemble.

use std::f64::consts::TAU;

use replay_runtime::replay_block;
use tch::{Kind, Tensor, nn};

/// Harmonics of the year that the model sees as sine and cosine.
const HARMONICS: i64 = 2;
/// Random numbers that each member draws a month.
const NOISE: i64 = 4;

/// Weights of the forecaster. Each is used once in a step, so that the gradients of a replayed rollout associate like
/// those of plain autograd and agree with them bit for bit.
#[derive(Debug)]
pub(crate) struct Forecaster {
    encode: nn::Linear,
    input_gates: nn::Linear,
    state_gates: nn::Linear,
    hidden: nn::Linear,
    output: nn::Linear,
    damping: Tensor,
    width: i64,
}

impl Forecaster {
    /// Makes the weights in a store.
    pub(crate) fn new(path: &nn::Path<'_>, width: i64) -> Self {
        let linear = |name: &str, from, to| nn::linear(path / name, from, to, nn::LinearConfig::default());
        // An untrained model forecasts the month means: what it knows beyond them, it learned.
        let small = nn::LinearConfig { ws_init: nn::Init::Const(0.0), bs_init: Some(nn::Init::Const(0.0)), bias: true };
        Self {
            encode: linear("encode", 1 + 2 * HARMONICS + NOISE, 2 * width),
            input_gates: linear("input_gates", 2 * width, 3 * width),
            state_gates: linear("state_gates", width, 3 * width),
            hidden: linear("hidden", width, width),
            output: nn::linear(path / "output", width, 1, small),
            damping: path.var("damping", &[1], nn::Init::Const(0.0)),
            width,
        }
    }

    /// The state before the first month.
    pub(crate) fn blank_state(&self, rows: i64) -> Tensor {
        Tensor::zeros([rows, self.width], (Kind::Float, self.damping.device()))
    }

    /// One month: from the state and the anomaly of `month` to the next state and the forecast of the month after.
    #[replay_block]
    pub(crate) fn step(&self, state: &Tensor, input: &Tensor, #[meta] month: i64) -> (Tensor, Tensor) {
        let rows = state.size()[0];
        let options = (Kind::Float, state.device());
        let season = season(month).to_device(state.device()).expand([rows, 2 * HARMONICS], false);
        let noise = Tensor::randn([rows, NOISE], options);
        let features = Tensor::cat(&[input, &season, &noise], 1);
        let from_input = features.apply(&self.encode).gelu("none").apply(&self.input_gates).chunk(3, 1);
        let from_state = state.apply(&self.state_gates).chunk(3, 1);
        let reset = (&from_input[0] + &from_state[0]).sigmoid();
        let keep = (&from_input[1] + &from_state[1]).sigmoid();
        let fresh = (&from_input[2] + reset * &from_state[2]).tanh();
        let next = &fresh + keep * (state - &fresh);
        let correction = next.apply(&self.hidden).gelu("none").apply(&self.output);
        let forecast = features.narrow(1, 0, 1) * &self.damping + correction;
        (next, forecast)
    }
}

/// Sine and cosine of the time of year, one row.
fn season(month: i64) -> Tensor {
    let angle = |harmonic: i64| TAU * (harmonic * month) as f64 / 12.0;
    let waves: Vec<f32> =
        (1..=HARMONICS).flat_map(|harmonic| [angle(harmonic).sin() as f32, angle(harmonic).cos() as f32]).collect();
    Tensor::from_slice(&waves).reshape([1, 2 * HARMONICS])
}
