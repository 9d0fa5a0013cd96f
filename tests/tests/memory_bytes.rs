//! Guarantee *memory*: `bytes_saved` is what saving the inputs keeps alive, to the byte: each storage once, whole, however
//! many blocks, views and versions of it there are, and nothing for what the model holds anyway. And of random generators
//! a state is kept only where a block drew.

use replay_runtime::{Rollout, RolloutReport};
use replay_tests::{Setup, randn};
use tch::{Device, Kind, Tensor, nn};

struct Model {
    /// 32 floats.
    table: Tensor,
    /// 6 floats.
    frozen: Tensor,
}

fn setup() -> Setup<Model> {
    let build = |path: &nn::Path<'_>| Model {
        table: path.var("table", &[8, 4], nn::Init::Const(0.5)),
        frozen: path.zeros_no_train("frozen", &[6]),
    };
    Setup::new(build)
}

/// One block over `inputs` that makes one number of them and the model's table.
fn sum(rollout: &Rollout<'_>, model: &Model, inputs: &[&Tensor]) -> Tensor {
    let table = model.table.shallow_clone();
    let named: Vec<_> = inputs.iter().map(|input| ("x", *input)).collect();
    let body = move |_: &Rollout<'_>, inputs: &[Tensor]| {
        inputs.iter().fold(table.sum(Kind::Float), |sum, input| sum + input.to_kind(Kind::Float).sum(Kind::Float))
    };
    rollout.block("sum", &named, body).unwrap()
}

fn end(rollout: Rollout<'_>, losses: &[Tensor]) -> RolloutReport {
    let report = rollout.backward(&Tensor::stack(losses, 0).sum(Kind::Float)).unwrap();
    assert_eq!(report.total.replays, report.total.forwards);
    report
}

/// The bytes of one rollout in which each of the lists is the input of one block.
fn saved(lists: impl Fn(&Model) -> Vec<Vec<Tensor>>) -> u64 {
    let setup = setup();
    let lists = lists(&setup.model);
    let rollout = Rollout::new(&setup.vs);
    let run = |inputs: &Vec<Tensor>| sum(&rollout, &setup.model, &inputs.iter().collect::<Vec<_>>());
    let losses: Vec<_> = lists.iter().map(run).collect();
    end(rollout, &losses).total.bytes_saved
}

fn floats(size: &[i64]) -> Tensor {
    randn(1, size, Kind::Float)
}

#[test]
fn a_context_of_sixty_four_blocks() {
    let context = floats(&[100]);
    let states: Vec<_> = (0..64).map(|_| floats(&[3])).collect();
    let lists = |_: &Model| states.iter().map(|state| vec![state.shallow_clone(), context.shallow_clone()]).collect();
    assert_eq!(saved(lists), 4 * (100 + 64 * 3));
}

#[test]
fn a_chain() {
    let setup = setup();
    let table = &setup.model.table;
    let rollout = Rollout::new(&setup.vs);
    let mut state = floats(&[8, 4]);
    for _ in 0..10 {
        state = rollout.block("step", &[("state", &state)], move |_, i| (&i[0] * table).tanh()).unwrap();
    }
    let report = rollout.backward(&state.sum(Kind::Float)).unwrap();
    assert_eq!(report.total.bytes_saved, 10 * 32 * 4);
}

/// Each block's view is made anew; they keep the one storage, all of it.
#[test]
fn views_made_anew() {
    let context = floats(&[64, 5]);
    let rows = |_: &Model| (0..64).map(|i| vec![context.get(i)]).collect();
    assert_eq!(saved(rows), 64 * 5 * 4);
    let same = |_: &Model| (0..64).map(|_| vec![context.narrow(0, 2, 3)]).collect();
    assert_eq!(saved(same), 64 * 5 * 4);
    let other_shapes = |_: &Model| vec![vec![context.tr(), context.view([-1])], vec![context.detach()]];
    assert_eq!(saved(other_shapes), 64 * 5 * 4);
}

/// A small part of a large storage keeps it whole, also when the large tensor itself is gone.
#[test]
fn a_part_keeps_the_whole() {
    assert_eq!(saved(|_| vec![vec![floats(&[1000]).narrow(0, 7, 1)]]), 4000);
}

#[test]
fn expanded_tensors() {
    let once = floats(&[5, 1]);
    let lists = |_: &Model| {
        vec![vec![once.expand([5, 1000], false)], vec![once.expand([5, 7], false), once.expand([3, 5, 1], false)]]
    };
    assert_eq!(saved(lists), 5 * 4);
}

#[test]
fn variables_and_their_parts() {
    let lists = |model: &Model| {
        let whole = vec![model.table.shallow_clone(), model.frozen.shallow_clone()];
        vec![whole, vec![model.table.get(3), model.frozen.narrow(0, 1, 2)], vec![model.table.detach().tr()]]
    };
    assert_eq!(saved(lists), 0);
}

/// Of one input under two versions one storage is kept.
#[test]
fn versions_of_one_input() {
    let setup = setup();
    let mut x = floats(&[50]);
    let rollout = Rollout::new(&setup.vs);
    let first = sum(&rollout, &setup.model, &[&x]);
    let _ = x.g_add_scalar_(1.0);
    let second = sum(&rollout, &setup.model, &[&x]);
    drop(first);
    assert_eq!(rollout.backward(&second).unwrap().total.bytes_saved, 50 * 4);
}

/// Other data under the same version are another storage.
#[test]
fn replaced_data() {
    let setup = setup();
    let mut x = floats(&[50]);
    let rollout = Rollout::new(&setup.vs);
    let first = sum(&rollout, &setup.model, &[&x]);
    x.set_data(&floats(&[20]));
    let second = sum(&rollout, &setup.model, &[&x]);
    drop(first);
    assert_eq!(rollout.backward(&second).unwrap().total.bytes_saved, (50 + 20) * 4);
}

/// Whatever is kept of a storage that died and came again at the same address is counted again.
#[test]
fn storages_at_one_address() {
    let setup = setup();
    let rollout = Rollout::new(&setup.vs);
    for _ in 0..100 {
        drop(sum(&rollout, &setup.model, &[&floats(&[50])]));
    }
    let loss = sum(&rollout, &setup.model, &[&floats(&[50])]);
    assert_eq!(rollout.backward(&loss).unwrap().total.bytes_saved, 101 * 50 * 4);
}

#[test]
fn a_mixture() {
    let context = floats(&[16, 4]);
    let kinds = Tensor::arange(10, (Kind::Int64, Device::Cpu));
    let halves = floats(&[7]).to_kind(Kind::BFloat16);
    let lists = |model: &Model| {
        let views = |i: i64| vec![context.get(i), kinds.narrow(0, i, 2), model.table.get(i), floats(&[i + 1])];
        let mut lists: Vec<_> = (0..4).map(views).collect();
        lists.push(vec![
            halves.shallow_clone(),
            halves.expand([9, 7], false),
            Tensor::zeros([0], (Kind::Float, Device::Cpu)),
        ]);
        lists
    };
    assert_eq!(saved(lists), 16 * 4 * 4 + 10 * 8 + 7 * 2 + 4 * (1 + 2 + 3 + 4));
}

/// Blocks of one name share a row, and rows add up to the total.
#[test]
fn the_first_block_that_keeps_it_is_charged() {
    let setup = setup();
    let table = &setup.model.table;
    let x = floats(&[11]);
    let rollout = Rollout::new(&setup.vs);
    let run = |name: &str| rollout.block(name, &[("x", &x)], move |_, i| i[0].sum(Kind::Float) * table).unwrap();
    let loss = run("first") + run("second");
    let report = rollout.backward(&loss.sum(Kind::Float)).unwrap();
    let bytes: Vec<_> = report.blocks.iter().map(|(name, block)| (name.as_str(), block.bytes_saved)).collect();
    assert_eq!(bytes, [("first", 44), ("second", 0)]);
    assert_eq!(report.total.bytes_saved, 44);
}
