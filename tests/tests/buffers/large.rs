//! Guarantee *buffers*, for a table of more than 1 MiB and more than one dimension: it is compared where its version or a few
//! of its values say that it was written, and all of it then.

use replay_runtime::{BlockOptions, ReplayError, Rollout, is_replaying};
use replay_tests::{Setup, same_bits};
use tch::{Device, Kind, Tensor};

const ROWS: i64 = 1000;
const COLUMNS: i64 = 300;

struct Model {
    weight: Tensor,
    table: Tensor,
}

fn setup() -> Setup<Model> {
    let weight = Tensor::from_slice(&[1f32, 2.0, 3.0, -4.0]);
    Setup::new(|path| Model {
        weight: path.var_copy("weight", &weight),
        table: path.ones_no_train("table", &[ROWS, COLUMNS]),
    })
}

fn x() -> Tensor {
    Tensor::ones([4], (Kind::Float, Device::Cpu))
}

/// A value that is none of those that are looked at each time.
fn cell(table: &Tensor) -> Tensor {
    table.get(ROWS / 2 + 3).get(5)
}

fn add_to_one(table: &Tensor) {
    let _ = cell(table).g_add_scalar_(1.0);
}

/// What the blocks read is the one value that they write.
fn step<'m>(rollout: &Rollout<'m>, model: &'m Model, h: &Tensor) -> Result<Tensor, ReplayError> {
    rollout.block_with(BlockOptions::new("step").buffers(true), &[("h", h)], |_, i| model.step(&i[0]))
}

impl Model {
    fn step(&self, h: &Tensor) -> Tensor {
        let y = h * &self.weight * cell(&self.table).copy();
        add_to_one(&self.table);
        y
    }
}

#[test]
fn each_replay_reads_what_its_forward_read() {
    let (plain, setup) = (setup(), setup());
    let expected = (0..4).fold(x(), |h, _| plain.model.step(&h));
    expected.sum(Kind::Float).backward();
    let rollout = Rollout::new(&setup.vs);
    let found = (0..4).fold(x(), |h, _| step(&rollout, &setup.model, &h).unwrap());
    rollout.backward(&found.sum(Kind::Float)).unwrap();
    assert!(same_bits(&expected, &found));
    assert!(same_bits(&plain.model.weight.grad(), &setup.model.weight.grad()));
    assert!(same_bits(&plain.model.table, &setup.model.table));
}

/// The replay leaves the version that its forward left, and other values.
#[test]
fn a_replay_that_writes_something_else_changes_nothing() {
    let setup = setup();
    let model = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let block = BlockOptions::new("step").buffers(true);
    let y = rollout.block_with(block, &[("h", &x())], |_, i| {
        let _ = cell(&model.table).g_add_scalar_(if is_replaying() { 5.0 } else { 1.0 });
        &i[0] * &model.weight
    });
    let after = model.table.copy();
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert!(same_bits(&after, &model.table));
}

#[test]
fn one_value_written_without_the_flag_is_an_error() {
    let setup = setup();
    let (model, before) = (&setup.model, setup.model.table.copy());
    let rollout = Rollout::new(&setup.vs);
    let error = rollout.block("step", &[("h", &x())], |_, i| {
        add_to_one(&model.table);
        &i[0] * &model.weight
    });
    let error = error.unwrap_err();
    assert!(matches!(&error, ReplayError::BufferWritten { variable, .. } if variable == "table"), "{error}");
    assert!(same_bits(&before, &model.table), "it was not put back");
}

#[test]
fn one_value_written_between_forward_and_replay_is_an_error() {
    let setup = setup();
    let model = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("step", &[("h", &x())], |_, i| &i[0] * &model.weight * model.table.get(0).get(0)).unwrap();
    tch::no_grad(|| add_to_one(&model.table));
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::VariableChanged { variable, .. } if variable == "table"), "{error}");
}

/// Values are compared, not versions.
#[test]
fn the_same_values_written_again_are_no_change() {
    let setup = setup();
    let model = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let rewrite = |table: &Tensor| tch::no_grad(|| table.shallow_clone().copy_(&table.copy()));
    let y = rollout.block("step", &[("h", &x())], |_, i| {
        rewrite(&model.table);
        &i[0] * &model.weight
    });
    let y = y.unwrap();
    rewrite(&model.table);
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert!(same_bits(&model.weight.grad(), &x()));
}

/// As LibTorch's kernels of normalisation do, to vectors, however long.
#[test]
fn a_long_vector_is_compared_by_value() {
    let setup = Setup::new(|path| (path.ones("weight", &[4]), path.ones_no_train("mean", &[400_000])));
    let (weight, mean) = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let error = rollout.block("step", &[("h", &x())], |_, i| {
        let _ = mean.data().get(12_345).g_add_scalar_(1.0);
        &i[0] * weight
    });
    let error = error.unwrap_err();
    assert!(matches!(&error, ReplayError::BufferWritten { variable, .. } if variable == "mean"), "{error}");
}
