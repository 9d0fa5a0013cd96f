//! What training, evaluation and both arms of the comparison start from.

use anyhow::{Context, Result};
use tch::nn::VarStore;

use crate::climate::Climate;
use crate::data::{self, Series};
use crate::model::Forecaster;
use crate::options::{Options, Place};
use crate::train::standardised;

/// The series that comes with the example; its origin is in `data/SOURCE.md`.
const SHIPPED: &[u8] = include_bytes!("../data/elnino.csv");

/// Series, weights and model.
#[derive(Debug)]
pub(crate) struct Setup {
    /// The series.
    pub(crate) series: Series,
    /// The first held-out month.
    pub(crate) split: usize,
    /// Month means and scale of the training years.
    pub(crate) climate: Climate,
    /// The series as the model sees it.
    pub(crate) anomalies: Vec<f32>,
    /// The weights.
    pub(crate) store: VarStore,
    /// The model.
    pub(crate) model: Forecaster,
}

impl Setup {
    /// Reads the series and makes a fresh model; the same for the same options.
    pub(crate) fn new(options: &Options) -> Result<Self> {
        if options.device == Place::Cuda {
            replay_runtime::cuda::load()?;
        }
        let series = match &options.csv {
            Some(path) => data::read(path, options.column.as_deref())?,
            None => data::parse(SHIPPED, None).context("the series that comes with the example")?,
        };
        let split = series.split(options.test_from)?;
        let climate = Climate::fit(&series.values[..split]);
        let anomalies = standardised(&series.values, &climate);
        tch::manual_seed(options.seed);
        let store = VarStore::new(options.device());
        let model = Forecaster::new(&store.root(), options.width);
        Ok(Self { series, split, climate, anomalies, store, model })
    }

    /// The name of the vertical axis.
    pub(crate) fn label(options: &Options) -> String {
        match (&options.csv, &options.column) {
            (None, _) => "Sea-surface temperature (°C)".to_owned(),
            (Some(_), Some(column)) => column.clone(),
            (Some(path), None) => {
                path.file_stem().map_or_else(|| "Value".to_owned(), |stem| stem.to_string_lossy().into_owned())
            }
        }
    }
}
