//! Six-month forecasts of the held-out years, and the three simple forecasts to beat.

use anyhow::{Result, ensure};
use tch::no_grad;

use crate::climate::Climate;
use crate::data::YEAR;
use crate::options::Options;
use crate::setup::Setup;
use crate::train::{Batch, unroll};

/// Months ahead that are judged.
pub(crate) const LEADS: usize = 6;

/// One forecast: the first month it is about, and a value for each lead.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Forecast {
    /// The index of the first month ahead.
    pub(crate) start: usize,
    /// The forecast of each month from there.
    pub(crate) values: [f64; LEADS],
}

/// Root mean square errors over all starts and leads one to six.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Errors {
    /// Of the trained model.
    pub(crate) model: f64,
    /// Of the month means of the training years.
    pub(crate) climatology: f64,
    /// Of the last observed value.
    pub(crate) persistence: f64,
    /// Of the value twelve months earlier.
    pub(crate) seasonal_naive: f64,
}

/// Every month of the held-out years from which six months ahead are known.
pub(crate) fn starts(split: usize, total: usize) -> std::ops::Range<usize> {
    split..(total + 1).saturating_sub(LEADS)
}

/// Forecasts from every start: a warm-up on what was observed before it, then six months on the model's own forecasts.
/// The forecast is the mean of the ensemble.
pub(crate) fn forecasts(setup: &Setup, options: &Options) -> Result<Vec<Forecast>> {
    let Setup { series, split, climate, anomalies, model, .. } = setup;
    let split = *split;
    let history = options.warm_up;
    let months = history + LEADS - 1;
    ensure!(split >= history, "{split} months before the held-out years are too few: a forecast reads {history}");
    let mut all = Vec::new();
    for month in 0..YEAR {
        let first: Vec<usize> = starts(split, series.values.len()).filter(|start| start % YEAR == month).collect();
        if first.is_empty() {
            continue;
        }
        let windows: Vec<usize> = first.iter().map(|start| start - history).collect();
        let batch = Batch::new(anomalies, &windows, months, options);
        let blank = model.blank_state((windows.len() * options.ensemble) as i64);
        let steps =
            no_grad(|| unroll(&batch, blank, history, |state, input, month| Ok(model.step(state, input, month))))?;
        let means = steps[history - 1..].iter().map(|rows| {
            let mean = rows.reshape([-1, batch.members]).mean_dim(1, false, tch::Kind::Double);
            Vec::<f64>::try_from(mean)
        });
        let means = means.collect::<Result<Vec<_>, _>>()?;
        all.extend(first.iter().enumerate().map(|(window, &start)| Forecast {
            start,
            values: std::array::from_fn(|lead| climate.restore(start + lead, means[lead][window])),
        }));
    }
    all.sort_by_key(|forecast| forecast.start);
    Ok(all)
}

/// Judges the model and the simple forecasts on the same starts.
pub(crate) fn errors(values: &[f64], forecasts: &[Forecast], climate: &Climate) -> Errors {
    let over = |predict: &dyn Fn(&Forecast, usize) -> f64| {
        let squares = forecasts.iter().flat_map(|forecast| (0..LEADS).map(move |lead| (forecast, lead)));
        let squares: Vec<f64> =
            squares.map(|(forecast, lead)| (predict(forecast, lead) - values[forecast.start + lead]).powi(2)).collect();
        (squares.iter().sum::<f64>() / squares.len() as f64).sqrt()
    };
    Errors {
        model: over(&|forecast, lead| forecast.values[lead]),
        climatology: over(&|forecast, lead| climate.restore(forecast.start + lead, 0.0)),
        persistence: over(&|forecast, _| values[forecast.start - 1]),
        seasonal_naive: over(&|forecast, lead| values[forecast.start + lead - YEAR]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three training years of a season, then a year and a half that is one warmer.
    fn values() -> Vec<f64> {
        (0..54u8).map(|index| f64::from(index % 12) + if index < 36 { 0.0 } else { 1.0 }).collect()
    }

    #[test]
    fn starts_leave_room_for_six_months() {
        assert_eq!(starts(36, 54), 36..49);
        assert!(starts(36, 40).is_empty());
    }

    #[test]
    fn simple_forecasts_have_the_errors_that_they_must_have() {
        let values = values();
        let climate = Climate::fit(&values[..36]);
        // The model is right in all but one of the twelve months, by half a degree.
        let forecast = |start: usize| Forecast { start, values: std::array::from_fn(|lead| values[start + lead]) };
        let mut forecasts = vec![forecast(36), forecast(48)];
        forecasts[0].values[2] += 0.5;
        let errors = errors(&values, &forecasts, &climate);
        assert!((errors.model - (0.25f64 / 12.0).sqrt()).abs() < 1e-9);
        assert!((errors.climatology - 1.0).abs() < 1e-9);
        // The first start looks back at a year that was one colder, the second at one as warm.
        assert!((errors.seasonal_naive - 0.5f64.sqrt()).abs() < 1e-9);
        // Last values 11 and 12, truths 1 to 6.
        let squares: f64 =
            (1..=6u8).map(|truth| (11.0 - f64::from(truth)).powi(2) + (12.0 - f64::from(truth)).powi(2)).sum();
        assert!((errors.persistence - (squares / 12.0).sqrt()).abs() < 1e-9);
    }
}
