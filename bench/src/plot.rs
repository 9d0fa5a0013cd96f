//! The two pictures: time against memory, and memory against the number of blocks.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::law::count;
use crate::rows::{Row, is_peer};
use crate::scaling::Point;

type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;

const FONT: &str = "bench";
const PANEL: (u32, u32) = (620, 460);
const COLORS: [RGBColor; 12] = [
    RGBColor(40, 40, 40),
    RGBColor(150, 150, 150),
    RGBColor(31, 119, 180),
    RGBColor(214, 69, 21),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(227, 119, 194),
    RGBColor(188, 143, 34),
    RGBColor(23, 190, 207),
    RGBColor(127, 0, 0),
    RGBColor(0, 90, 60),
];

/// Makes the font known: it comes with a crate, since a bare machine may have none.
fn prepare() -> Result<()> {
    register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT)
        .map_err(|_| anyhow!("the font that comes with the benchmark cannot be read"))
}

/// What is drawn in one color.
struct Series {
    name: String,
    color: RGBColor,
    /// Python's arms are rings.
    ring: bool,
    line: bool,
    points: Vec<(f64, f64)>,
}

/// One panel for each workload: time over plain, and resident memory over plain, one point for each arm.
pub(crate) fn results(path: &Path, rows: &[Row]) -> Result<()> {
    prepare()?;
    let mut workloads: Vec<_> = rows.iter().map(|row| row.workload).collect();
    workloads.dedup();
    let columns = workloads.len().clamp(1, 2);
    let lines = workloads.len().div_ceil(columns).max(1);
    let size = (PANEL.0 * u32::try_from(columns)?, PANEL.1 * u32::try_from(lines)?);
    let root = BitMapBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, workload) in root.split_evenly((lines, columns)).iter().zip(&workloads) {
        let own: Vec<_> = rows.iter().filter(|row| row.workload == *workload).collect();
        let title = format!("{}, {} blocks", workload.name(), own[0].blocks);
        let series: Vec<_> = own.iter().zip(COLORS.into_iter().cycle()).map(|(row, color)| point(row, color)).collect();
        panel(area, &title, "Peak of resident memory over the start (MiB)", "Processor time over plain", &series)?;
    }
    root.present().with_context(|| format!("cannot write {}", path.display()))
}

fn point(row: &Row, color: RGBColor) -> Series {
    let points = vec![(row.peak_mb, row.ratio_to_plain)];
    Series { name: row.arm.clone(), color, ring: is_peer(&row.arm), line: false, points }
}

/// The live peak of each arm over the number of blocks.
pub(crate) fn scaling(path: &Path, points: &[Point]) -> Result<()> {
    prepare()?;
    let root = BitMapBackend::new(path, (900, 620)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut series: Vec<Series> = Vec::new();
    for point in points {
        if series.last().is_none_or(|last| last.name != point.arm) {
            let color = COLORS[series.len() % COLORS.len()];
            series.push(Series { name: point.arm.clone(), color, ring: false, line: true, points: Vec::new() });
        }
        let last = series.last_mut().context("a series was begun")?;
        last.points.push((count(point.blocks), point.live_peak_mb));
    }
    let title =
        points.first().map_or_else(String::new, |point| format!("{}: live bytes of one step", point.workload.name()));
    panel(&root, &title, "Blocks", "Peak of live bytes over the start (MiB)", &series)?;
    root.present().with_context(|| format!("cannot write {}", path.display()))
}

fn panel(area: &Area<'_>, title: &str, x: &str, y: &str, series: &[Series]) -> Result<()> {
    let most =
        |pick: fn(&(f64, f64)) -> f64| series.iter().flat_map(|series| &series.points).map(pick).fold(1e-9, f64::max);
    // From zero on, since both are quantities; the legend gets room at the side.
    let (right, top) = (most(|point| point.0) * 1.75, most(|point| point.1) * 1.15);
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 24))
        .margin(14)
        .x_label_area_size(52)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..right, 0.0..top)?;
    let axis = (FONT, 18);
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(y)
        .axis_desc_style(axis)
        .label_style((FONT, 16))
        .light_line_style(WHITE)
        .draw()?;
    for series in series {
        let style = if series.ring { series.color.stroke_width(3) } else { series.color.filled() };
        if series.line {
            chart.draw_series(LineSeries::new(series.points.iter().copied(), series.color.stroke_width(2)))?;
        }
        let marks = series.points.iter().map(|&point| Circle::new(point, 5, style));
        chart.draw_series(marks)?.label(&series.name).legend(move |point| Circle::new(point, 5, style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(6)
        .legend_area_size(22)
        .background_style(WHITE.mix(0.9))
        .border_style(COLORS[1])
        .label_font((FONT, 16))
        .draw()?;
    Ok(())
}
