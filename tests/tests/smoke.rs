//! x
use replay_runtime::Rollout;
use tch::{Device, Kind, Tensor, nn, nn::Module};
#[test]
fn first() {
    tch::set_num_threads(1);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 8, 8, Default::default());
    let x = Tensor::randn([4, 8], (Kind::Float, Device::Cpu));
    let run = |replay: bool| {
        for (_, mut v) in vs.variables() { v.zero_grad(); }
        let mut s = x.shallow_clone();
        if replay {
            let r = Rollout::new(&vs);
            for _ in 0..5 { s = r.block("step", &[("s", &s)], |_, i| model.forward(&i[0]).tanh()).unwrap(); }
            println!("{}", r.backward(&s.square().mean(Kind::Float)).unwrap());
        } else {
            for _ in 0..5 { s = model.forward(&s).tanh(); }
            s.square().mean(Kind::Float).backward();
        }
        model.ws.grad().copy()
    };
    let a = run(false); let b = run(true);
    assert!(a.equal(&b));
    let err = { let r = Rollout::new(&vs); let y = r.block("step", &[("s", &x)], |_, i| model.forward(&i[0]).tanh()).unwrap(); y.sum(Kind::Float).f_backward().unwrap_err() };
    println!("{err}");
}
