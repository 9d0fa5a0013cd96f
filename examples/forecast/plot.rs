//! The two pictures: forecasts against truth, and memory over time.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::compare::{Comparison, Usage};
use crate::evaluate::{Forecast, LEADS};
use crate::setup::Setup;

type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;

/// Pieces of one line, each drawn without lifting the pen.
type Pieces = Vec<Vec<(f64, f64)>>;

const FONT: &str = "example";
const TRUTH: RGBColor = RGBColor(40, 40, 40);
const SEASON: RGBColor = RGBColor(150, 150, 150);
const FORECAST: RGBColor = RGBColor(214, 69, 21);
const PLAIN: RGBColor = RGBColor(192, 57, 43);
const REPLAY: RGBColor = RGBColor(31, 119, 180);

/// Makes the font known: it comes with a crate, since a bare machine may have none.
fn prepare() -> Result<()> {
    register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT)
        .map_err(|_| anyhow!("the font that comes with the example cannot be read"))
}

/// Draws every sixth forecast of the held-out years, so that they follow each other without overlap.
pub(crate) fn forecasts(path: &Path, setup: &Setup, forecasts: &[Forecast], label: &str) -> Result<()> {
    prepare()?;
    let root = BitMapBackend::new(path, (1500, 1000)).into_drawing_area();
    root.fill(&WHITE)?;
    let (upper, lower) = root.split_vertically(520);
    let values = &setup.series.values;
    let (split, climate) = (setup.split, &setup.climate);
    let time = |index: usize| setup.series.year_at(index);
    let shown: Vec<&Forecast> = forecasts.iter().step_by(LEADS).collect();
    let line = |from: &dyn Fn(usize) -> f64| -> Vec<(f64, f64)> {
        (split..values.len()).map(|index| (time(index), from(index))).collect()
    };
    let segments = |shift: &dyn Fn(usize) -> f64| -> Pieces {
        let one = |forecast: &&Forecast| {
            // Each starts at the last value that was known.
            let known = (forecast.start - 1, values[forecast.start - 1]);
            let ahead = (0..LEADS).map(|lead| (forecast.start + lead, forecast.values[lead]));
            std::iter::once(known).chain(ahead).map(|(index, value)| (time(index), value - shift(index))).collect()
        };
        shown.iter().map(one).collect()
    };
    let season = |index: usize| climate.restore(index, 0.0);
    let value_panel = Panel {
        title: format!("Six-month forecasts of the held-out years, eastern Pacific, one every {LEADS} months"),
        label: label.to_owned(),
        lines: vec![
            ("month means of the training years", SEASON, vec![line(&season)]),
            ("observed", TRUTH, vec![line(&|index| values[index])]),
            ("forecast (mean of the ensemble)", FORECAST, segments(&|_| 0.0)),
        ],
    };
    let anomaly_panel = Panel {
        title: "The same, less the month means".to_owned(),
        label: "Anomaly (°C)".to_owned(),
        lines: vec![
            ("month means of the training years", SEASON, vec![line(&|_| 0.0)]),
            ("observed", TRUTH, vec![line(&|index| values[index] - season(index))]),
            ("forecast (mean of the ensemble)", FORECAST, segments(&season)),
        ],
    };
    value_panel.draw(&upper, "")?;
    anomaly_panel.draw(&lower, if setup.series.first_year.is_some() { "Year" } else { "Years since the start" })?;
    root.present().with_context(|| format!("cannot write {}", path.display()))
}

/// Draws resident memory over one step of both arms.
pub(crate) fn memory(path: &Path, comparison: &Comparison) -> Result<()> {
    prepare()?;
    let root = BitMapBackend::new(path, (1200, 700)).into_drawing_area();
    root.fill(&WHITE)?;
    let line = |usage: &Usage| -> Vec<(f64, f64)> {
        let base = usage.memory.first().map_or(0.0, |sample| sample.mb);
        usage.memory.iter().map(|sample| (sample.seconds, sample.mb - base)).collect()
    };
    let name = |arm: &str, usage: &Usage| format!("{arm}: peak {:.0} MB", usage.peak_mb);
    let (plain, replay) = (name("plain autograd", &comparison.plain), name("replay blocks", &comparison.replay));
    let panel = Panel {
        title: "Memory of one training step, forward and backward".to_owned(),
        label: "Resident memory over the start (MB)".to_owned(),
        lines: vec![(&plain, PLAIN, vec![line(&comparison.plain)]), (&replay, REPLAY, vec![line(&comparison.replay)])],
    };
    panel.draw(&root, "Seconds since the step began")?;
    root.present().with_context(|| format!("cannot write {}", path.display()))
}

/// One chart: named lines, each of one or more pieces.
struct Panel<'a> {
    title: String,
    label: String,
    lines: Vec<(&'a str, RGBColor, Pieces)>,
}

impl Panel<'_> {
    /// Draws axes, lines and a legend above the highest line.
    fn draw(&self, area: &Area<'_>, time_label: &str) -> Result<()> {
        let points = || self.lines.iter().flat_map(|(_, _, pieces)| pieces.iter().flatten());
        let over = |pick: fn(&(f64, f64)) -> f64| {
            points()
                .map(pick)
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
        };
        let (left, right) = over(|point| point.0);
        let (low, high) = over(|point| point.1);
        // The legend gets a band of its own above the lines.
        let room = (high - low).max(1e-9);
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, (FONT, 28))
            .margin(18)
            .x_label_area_size(if time_label.is_empty() { 32 } else { 56 })
            .y_label_area_size(84)
            .build_cartesian_2d(left..right, low - room * 0.05..high + room * 0.3)?;
        chart
            .configure_mesh()
            .x_desc(time_label)
            .y_desc(&self.label)
            .axis_desc_style((FONT, 22))
            .label_style((FONT, 20))
            .x_labels(14)
            .x_label_formatter(&|value| {
                if (value - value.round()).abs() < 1e-9 { format!("{value:.0}") } else { format!("{value:.1}") }
            })
            .y_label_formatter(&|value| if room > 20.0 { format!("{value:.0}") } else { format!("{value:.1}") })
            .light_line_style(WHITE)
            .draw()?;
        for (name, color, pieces) in &self.lines {
            let style = color.stroke_width(2);
            for (index, piece) in pieces.iter().enumerate() {
                let drawn = chart.draw_series(LineSeries::new(piece.iter().copied(), style))?;
                if index == 0 {
                    drawn.label(*name).legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 26, y)], style));
                }
            }
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .margin(8)
            .legend_area_size(34)
            .background_style(WHITE.mix(0.9))
            .border_style(SEASON)
            .label_font((FONT, 20))
            .draw()?;
        Ok(())
    }
}
