//! An autoregressive forecaster, trained through rollouts of six years with replay blocks.
//!
//! `cargo run --example forecast -- --help` lists the options.

// Months, members and rows are few: every count fits every number type used here.
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss
)]

mod climate;
mod compare;
mod data;
mod evaluate;
mod model;
mod options;
mod plot;
mod process;
mod report;
mod setup;
mod train;
mod worker;

use anyhow::{Context, Result};
use clap::Parser;

use crate::compare::compare;
use crate::options::Options;
use crate::report::{Progress, Summary};
use crate::setup::Setup;

fn main() -> Result<()> {
    let options = Options::parse();
    options.validate()?;
    if let Some(arm) = options.worker {
        return worker::serve(arm, &options);
    }
    tch::set_num_threads(options.threads);
    std::fs::create_dir_all(&options.out)
        .with_context(|| format!("cannot make the folder {}", options.out.display()))?;
    let setup = Setup::new(&options)?;
    println!(
        "{} months to learn from, {} held out; {} months a rollout, {} windows of {} members, width {}",
        setup.split,
        setup.series.values.len() - setup.split,
        options.months,
        options.windows,
        options.ensemble,
        options.width
    );

    let progress = Progress::start("training", options.steps);
    let trained = train::train(&setup, &options, |step, loss| progress.at(step + 1, format!("loss {loss:.4}")))?;
    progress.finish();
    if let Some(report) = &trained.report {
        println!("The last training step:\n{report}");
    }
    let weights = worker::weights_file(&options.out);
    setup.store.save(&weights).with_context(|| format!("cannot write {}", weights.display()))?;

    let forecasts = evaluate::forecasts(&setup, &options)?;
    let errors = evaluate::errors(&setup.series.values, &forecasts, &setup.climate);
    report::print_errors(&errors, forecasts.len());
    let picture = options.out.join("forecasts.png");
    plot::forecasts(&picture, &setup, &forecasts, &Setup::label(&options))?;

    let progress = Progress::start("comparing", compare::TIMED);
    let comparison = compare(&options, |round| progress.at(round, String::new()))?;
    progress.finish();
    report::print_comparison(&comparison, options.device);
    let memory = options.out.join("memory.png");
    plot::memory(&memory, &comparison)?;
    println!("Pictures: {} and {}", picture.display(), memory.display());
    if options.json {
        println!("{}", serde_json::to_string(&Summary::new(&trained.losses, &errors, &comparison))?);
    }
    Ok(())
}
