//! Guarantee *devices*: blocks run on the CPU and on one CUDA device per rollout; anything else is refused in the forward.
//!
//! Tensors on other kinds of device cannot be made without their hardware, so the refusal is tested with two CUDA
//! devices. Every test loads CUDA first: LibTorch keeps its first answer about it.

use replay_runtime::{ReplayError, Rollout, cuda};
use tch::{Device, Kind, Tensor, nn, nn::Module};

/// Whether there is CUDA, asked before anything else is.
fn cuda_loads() -> bool {
    cuda::load().is_ok()
}

fn model(device: Device) -> (nn::VarStore, nn::Linear) {
    tch::manual_seed(7);
    let vs = nn::VarStore::new(device);
    let model = nn::linear(vs.root(), 32, 32, nn::LinearConfig::default());
    (vs, model)
}

fn x(device: Device) -> Tensor {
    tch::manual_seed(3);
    Tensor::randn([8, 32], (Kind::Float, Device::Cpu)).to_device(device)
}

/// The gradients of eight steps with dropout `p`, by plain autograd or replayed.
fn gradients(device: Device, p: f64, replay: bool, offload: bool) -> Vec<Tensor> {
    let (vs, model) = model(device);
    let rollout = Rollout::builder(&vs).offload(offload).build();
    let step = |h: &Tensor| model.forward(h).tanh().dropout(p, true);
    let mut h = x(device);
    tch::manual_seed(11);
    for _ in 0..8 {
        h = if replay { rollout.block("step", &[("h", &h)], move |_, i| step(&i[0])).unwrap() } else { step(&h) };
    }
    let loss = h.square().mean(Kind::Float);
    if replay {
        let report = rollout.backward(&loss).unwrap();
        assert_eq!(report.total.replays, 8);
        let on_host = if offload && device.is_cuda() { report.total.bytes_saved } else { 0 };
        assert_eq!(report.total.bytes_on_host, on_host);
    } else {
        loss.backward();
    }
    vs.trainable_variables().iter().map(Tensor::grad).collect()
}

/// Each weight is used once per block, so plain autograd is the oracle; kernels that add in no fixed order are not used.
fn assert_equal_to_plain(device: Device, p: f64, offload: bool) {
    let plain = gradients(device, p, false, false);
    let replayed = gradients(device, p, true, offload);
    assert!(!plain.is_empty());
    for (plain, replayed) in plain.iter().zip(&replayed) {
        assert!(plain.equal(replayed), "{plain}\n{replayed}");
    }
}

#[test]
fn blocks_run_on_the_cpu() {
    cuda_loads();
    assert_equal_to_plain(Device::Cpu, 0.0, false);
    assert_equal_to_plain(Device::Cpu, 0.3, false);
}

#[test]
fn offload_leaves_cpu_inputs_where_they_are() {
    cuda_loads();
    assert_equal_to_plain(Device::Cpu, 0.0, true);
}

/// On a machine without CUDA the error names the library that is missing, or says that there is no GPU.
#[test]
fn missing_cuda_is_an_error_that_says_what_is_missing() {
    let available = cuda_loads();
    assert_eq!(cuda::is_available(), available);
    assert_eq!(cuda::device_if_available(), if available { Device::Cuda(0) } else { Device::Cpu });
    if let Err(error) = cuda::load() {
        assert!(matches!(&error, ReplayError::Cuda { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("libtorch_cuda.so") || text.contains("no usable GPU"), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
        assert_eq!(text, cuda::load().unwrap_err().to_string(), "the same each time");
    }
}

#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn blocks_run_on_cuda() {
    assert!(cuda_loads());
    assert_equal_to_plain(Device::Cuda(0), 0.0, false);
}

#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn dropout_on_cuda_is_replayed_and_the_generator_goes_on() {
    assert!(cuda_loads());
    let device = Device::Cuda(0);
    assert_equal_to_plain(device, 0.3, false);
    let after = |replay| {
        gradients(device, 0.3, replay, false);
        Tensor::rand([4], (Kind::Float, device))
    };
    assert!(after(false).equal(&after(true)));
}

#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn inputs_wait_on_the_host() {
    assert!(cuda_loads());
    assert_equal_to_plain(Device::Cuda(0), 0.0, true);
    assert_equal_to_plain(Device::Cuda(0), 0.3, true);
}

/// An expanded input goes to the host as the one value that it is, and comes back in its shape.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn an_expanded_input_on_the_host_is_not_inflated() {
    assert!(cuda_loads());
    let device = Device::Cuda(0);
    let (vs, model) = model(device);
    let rollout = Rollout::builder(&vs).offload(true).build();
    let x = Tensor::ones([1, 32], (Kind::Float, device)).expand([1000, 32], false);
    let y = rollout.block("wide", &[("x", &x)], |_, i| model.forward(&i[0])).unwrap();
    let report = rollout.backward(&y.mean(Kind::Float)).unwrap();
    assert_eq!(report.total.bytes_on_host, 128);
}

/// On CUDA the engine runs replays on a thread of its own, also those of blocks inside blocks.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn nested_blocks_and_mixed_devices_run_on_cuda() {
    assert!(cuda_loads());
    let device = Device::Cuda(0);
    let plain = {
        let (vs, model) = model(device);
        let y = model.forward(&model.forward(&x(device)).tanh()).tanh();
        y.square().mean(Kind::Float).backward();
        vs.trainable_variables().iter().map(Tensor::grad).collect::<Vec<_>>()
    };
    let (vs, model) = model(device);
    let model = &model;
    let rollout = Rollout::new(&vs);
    let y = rollout
        .block("outer", &[("x", &x(Device::Cpu))], move |rollout, i| {
            let mut h = i[0].to_device(device);
            for _ in 0..2 {
                h = rollout.block("inner", &[("h", &h)], move |_, i| model.forward(&i[0]).tanh())?;
            }
            Ok::<_, ReplayError>(h)
        })
        .unwrap();
    rollout.backward(&y.square().mean(Kind::Float)).unwrap();
    for (plain, variable) in plain.iter().zip(vs.trainable_variables()) {
        assert!(plain.allclose(&variable.grad(), 1e-5, 1e-7, false));
    }
}

#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn a_panic_in_a_replay_on_cuda_comes_out() {
    assert!(cuda_loads());
    let device = Device::Cuda(0);
    let (vs, model) = model(device);
    let rollout = Rollout::new(&vs);
    let y = rollout
        .block("panics", &[("x", &x(device))], |_, i| {
            assert!(!replay_runtime::is_replaying(), "on the engine's thread");
            model.forward(&i[0])
        })
        .unwrap();
    let loss = y.sum(Kind::Float);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rollout.backward(&loss))).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"on the engine's thread"));
    assert!(!model.ws.grad().defined());
}

#[test]
#[ignore = "needs two CUDA devices"]
fn a_second_cuda_device_is_refused_in_the_forward() {
    assert!(cuda_loads());
    assert!(tch::Cuda::device_count() > 1);
    let (vs, model) = model(Device::Cuda(0));
    let rollout = Rollout::new(&vs);
    let result = rollout.block("step", &[("x", &x(Device::Cuda(1)))], |_, i| i[0].tanh());
    assert_device_error(&result.unwrap_err(), "input `x`");
    let result =
        rollout.block("moves", &[("x", &x(Device::Cuda(0)))], |_, i| model.forward(&i[0]).to_device(Device::Cuda(1)));
    assert_device_error(&result.unwrap_err(), "output 0");
}

fn assert_device_error(error: &ReplayError, names: &str) {
    let ReplayError::Device { tensor, expected, found, .. } = error else { panic!("{error}") };
    assert_eq!((tensor.as_str(), expected.as_str(), found.as_str()), (names, "Cuda(0)", "Cuda(1)"));
}

/// The generator of a device that shows up inside the block was not kept before it.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn a_device_that_shows_up_inside_a_block_must_be_announced() {
    cuda::load().unwrap();
    let device = Device::Cuda(0);
    let vs = nn::VarStore::new(Device::Cpu);
    let scale = vs.root().randn_standard("scale", &[64]);
    let run = |announced: bool| {
        let builder = Rollout::builder(&vs);
        let rollout = if announced { builder.device(device).build() } else { builder.build() };
        let y = rollout.block("moves", &[("x", &Tensor::ones([64], (Kind::Float, Device::Cpu)))], |_, i| {
            (&i[0] * &scale).to_device(device).dropout(0.5, true).to_device(Device::Cpu)
        })?;
        rollout.backward(&y.sum(Kind::Float))?;
        // The gradient is the mask, and so is the output over the scale.
        Ok::<_, ReplayError>(scale.grad() == (y / &scale).detach().round())
    };
    let error = run(false).unwrap_err();
    assert!(matches!(&error, ReplayError::UnknownDevice { block, .. } if block == "moves"), "{error:?}");
    assert!(run(true).unwrap());
}

#[test]
#[should_panic(expected = "on the CPU or on CUDA")]
fn another_kind_of_device_is_refused_at_once() {
    let vs = nn::VarStore::new(Device::Cpu);
    let _ = Rollout::builder(&vs).device(Device::Mps);
}

/// On a machine without CUDA.
#[test]
#[cfg_attr(cuda, ignore = "needs a machine without CUDA")]
fn a_device_that_is_not_there_is_an_error_of_the_first_block() {
    let vs = nn::VarStore::new(Device::Cpu);
    let rollout = Rollout::builder(&vs).device(Device::Cuda(0)).build();
    let error = rollout.block("step", &[("x", &x(Device::Cpu))], |_, i| i[0].sin()).unwrap_err();
    let text = error.to_string();
    println!("{text}");
    assert!(text.contains("`step`") && text.lines().count() <= 2, "{text}");
}
