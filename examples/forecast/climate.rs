//! What the training years say about the season: month means, and the scale of the anomalies around them.

use crate::data::{Series, YEAR};

/// Month means and scale, from training months only.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Climate {
    /// The mean of each calendar month.
    pub(crate) means: [f64; YEAR],
    /// The standard deviation of the anomalies.
    pub(crate) scale: f64,
}

impl Climate {
    /// Measures the first months of a series; `training` is at least a year.
    pub(crate) fn fit(training: &[f64]) -> Self {
        let mut means = [0.0; YEAR];
        for (month, mean) in means.iter_mut().enumerate() {
            let same: Vec<f64> = training.iter().skip(month).step_by(YEAR).copied().collect();
            *mean = same.iter().sum::<f64>() / same.len() as f64;
        }
        let square = |(index, value): (usize, &f64)| (value - means[Series::month_of(index)]).powi(2);
        let variance = training.iter().enumerate().map(square).sum::<f64>() / training.len() as f64;
        // A series that is only its season would otherwise be divided by zero.
        Self { means, scale: variance.sqrt().max(1e-6) }
    }

    /// The value of a month as a standardised anomaly.
    pub(crate) fn standardise(&self, index: usize, value: f64) -> f64 {
        (value - self.means[Series::month_of(index)]) / self.scale
    }

    /// The value that a standardised anomaly stands for.
    pub(crate) fn restore(&self, index: usize, anomaly: f64) -> f64 {
        self.means[Series::month_of(index)] + anomaly * self.scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_and_scale_come_from_the_training_months() {
        let values: Vec<f64> = (0..36u8).map(|index| f64::from(index % 12) + f64::from(index / 12) - 1.0).collect();
        let climate = Climate::fit(&values);
        assert!((climate.means[5] - 5.0).abs() < 1e-12);
        assert!((climate.scale - (2.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert!((climate.restore(17, climate.standardise(17, 3.5)) - 3.5).abs() < 1e-12);
    }
}
