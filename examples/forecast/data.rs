//! Reads a monthly series from a CSV file: a table of years by months, or one value a row.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};

/// Months in a year: the season that the whole example is about.
pub(crate) const YEAR: usize = 12;

/// A monthly series that starts in January.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Series {
    /// The year of the first value, where the file names years.
    pub(crate) first_year: Option<i64>,
    /// One value a month.
    pub(crate) values: Vec<f64>,
}

impl Series {
    /// The calendar month of a value, January being 0.
    pub(crate) fn month_of(index: usize) -> usize {
        index % YEAR
    }

    /// The time axis of the plots: a fractional year, or years since the start where the file names none.
    pub(crate) fn year_at(&self, index: usize) -> f64 {
        self.first_year.unwrap_or(0) as f64 + index as f64 / YEAR as f64
    }

    /// Where the held-out months start: January of `year`, or the last fifth in whole years where the file names no years.
    pub(crate) fn split(&self, year: Option<i64>) -> Result<usize> {
        let years = self.values.len() / YEAR;
        match (self.first_year, year) {
            (None, Some(_)) => {
                bail!("--test-from needs years, and this file has none: give a table of years by months")
            }
            (None, None) => Ok((years - years / 5) * YEAR),
            (Some(first), wanted) => {
                let wanted = wanted.unwrap_or(1999);
                let last = first + i64::try_from(years)? - 1;
                ensure!(
                    wanted > first && wanted <= last,
                    "no months to hold out from {wanted}: choose a year from {} to {last} with --test-from YEAR",
                    first + 1
                );
                Ok(usize::try_from(wanted - first)? * YEAR)
            }
        }
    }
}

/// Reads a file; `column` picks one column of a file with a header and one value a row.
pub(crate) fn read(path: &Path, column: Option<&str>) -> Result<Series> {
    let name = path.display();
    let file = File::open(path).map_err(|error| anyhow!("cannot open {name} ({error}): name a CSV file with --csv"))?;
    parse(file, column).map_err(|error| anyhow!("{name}, {error:#}"))
}

/// Reads the text of a file; errors name line and column.
pub(crate) fn parse(mut input: impl Read, column: Option<&str>) -> Result<Series> {
    let mut text = String::new();
    input.read_to_string(&mut text).context("not a CSV file in UTF-8")?;
    check_no_gap(&text)?;
    let mut reader =
        csv::ReaderBuilder::new().has_headers(false).flexible(true).trim(csv::Trim::All).from_reader(text.as_bytes());
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.context("not a CSV file in UTF-8")?;
        let line = record.position().map_or(0, csv::Position::line);
        if record.iter().any(|cell| !cell.is_empty()) {
            rows.push(Row { line, cells: record.iter().map(str::to_owned).collect() });
        }
    }
    let Some(first) = rows.first() else { bail!("the file is empty: it needs one value a month") };
    let series = if first.cells[0].eq_ignore_ascii_case("year") && first.cells.len() == YEAR + 1 && column.is_none() {
        parse_table(&rows)?
    } else {
        parse_column(&rows, column)?
    };
    let years = series.values.len() / YEAR;
    ensure!(
        years >= 10,
        "{} months are too few: ten years (120 values) are the least to learn from",
        series.values.len()
    );
    Ok(series)
}

/// An empty line in between is a missing month; skipped, it would move all later ones.
fn check_no_gap(text: &str) -> Result<()> {
    let text = text.trim_end_matches(|end: char| end == ',' || end.is_whitespace());
    let empty = |line: &str| line.chars().all(|cell| cell == ',' || cell.is_whitespace());
    match text.lines().position(empty) {
        Some(i) if !text.is_empty() => {
            bail!("line {}: empty; the series must have no gaps, so fill it in or cut the file there", i + 1)
        }
        _ => Ok(()),
    }
}

/// One row of a file, and its line for messages.
struct Row {
    line: u64,
    cells: Vec<String>,
}

impl Row {
    fn number(&self, index: usize, name: &str) -> Result<f64> {
        let line = self.line;
        let Some(cell) = self.cells.get(index).filter(|cell| !cell.is_empty()) else {
            bail!(
                "line {line}, column {name}: no value; the series must have no gaps, so fill it in or cut the file there"
            );
        };
        match cell.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(value),
            _ => bail!("line {line}, column {name}: {cell:?} is not a number; write it as 23.1"),
        }
    }
}

/// A header of `YEAR` and twelve months, then one row a year. The last year may end early.
fn parse_table(rows: &[Row]) -> Result<Series> {
    let names = &rows[0].cells;
    let mut values = Vec::new();
    let mut first_year = None;
    for (index, row) in rows[1..].iter().enumerate() {
        let line = row.line;
        let year = row.cells[0].parse::<i64>();
        let Ok(year) = year else {
            bail!("line {line}, column {}: {:?} is not a year; write it as 1950", names[0], row.cells[0])
        };
        let expected = *first_year.get_or_insert(year) + i64::try_from(index)?;
        ensure!(
            year == expected,
            "line {line}, column {}: found year {year}, expected {expected}; every year needs its row, in order",
            names[0]
        );
        let last_row = index + 2 == rows.len();
        let filled = row.cells.iter().rposition(|cell| !cell.is_empty()).unwrap_or(0);
        let end = if last_row { filled } else { YEAR };
        for month in 1..=end {
            values.push(row.number(month, names.get(month).map_or("?", String::as_str))?);
        }
        ensure!(row.cells.len() <= YEAR + 1, "line {line}: {} cells, expected a year and 12 months", row.cells.len());
    }
    Ok(Series { first_year, values })
}

/// One value a row, with or without a header; the first is taken as a January.
fn parse_column(rows: &[Row], column: Option<&str>) -> Result<Series> {
    let head = &rows[0];
    let header = head.cells.iter().any(|cell| cell.parse::<f64>().is_err());
    let index = match column {
        Some(name) => {
            ensure!(header, "line 1: no header to find column {name} in; add one, or leave --column out");
            let found = head.cells.iter().position(|cell| cell.eq_ignore_ascii_case(name));
            let Some(found) = found else { bail!("line 1: no column {name}; choose one of {}", head.cells.join(", ")) };
            found
        }
        None if head.cells.len() == 1 => 0,
        None if header => {
            bail!("line 1: {} columns; choose one with --column, of {}", head.cells.len(), head.cells.join(", "))
        }
        None => bail!(
            "line 1: {} columns without a header; expected one value a row, or a header of YEAR and 12 months",
            head.cells.len()
        ),
    };
    let name = if header { head.cells[index].clone() } else { (index + 1).to_string() };
    let values = rows[usize::from(header)..].iter().map(|row| row.number(index, &name)).collect::<Result<_>>()?;
    Ok(Series { first_year: None, values })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "\"YEAR\",JAN,FEB,MAR,APR,MAY,JUN,JUL,AUG,SEP,OCT,NOV,DEC\n";

    fn lines(rows: impl Iterator<Item = String>) -> String {
        rows.map(|row| row + "\n").collect()
    }

    fn table(years: usize) -> String {
        let row = |year: usize| format!("{},{}", 1950 + year, ["20.5"; 12].join(","));
        HEAD.to_owned() + &lines((0..years).map(row))
    }

    fn message(text: &str, column: Option<&str>) -> String {
        format!("{:#}", parse(text.as_bytes(), column).unwrap_err())
    }

    #[test]
    fn the_shipped_series_is_61_years() {
        let series = parse(include_bytes!("../data/elnino.csv").as_slice(), None).unwrap();
        assert_eq!(series.first_year, Some(1950));
        assert_eq!(series.values.len(), 61 * YEAR);
        assert_eq!(series.values[..2], [23.11, 24.20]);
        assert_eq!(series.split(None).unwrap(), 49 * YEAR);
    }

    #[test]
    fn the_last_year_may_end_early_but_a_gap_is_an_error() {
        let text = table(10) + "1960,1,2,3,,,,,,,,,\n";
        assert_eq!(parse(text.as_bytes(), None).unwrap().values[119..], [20.5, 1.0, 2.0, 3.0]);
        let gap = table(10) + "1960,1,,3,,,,,,,,,\n";
        assert!(message(&gap, None).starts_with("line 12, column FEB: no value"));
        let blank = lines((0..120).map(|value: i32| if value == 50 { String::new() } else { value.to_string() }));
        assert!(message(&blank, None).starts_with("line 51: empty"));
    }

    #[test]
    fn errors_name_line_and_column() {
        let text = table(10).replacen("1952,20.5,20.5", "1952,20.5,n/a", 1);
        assert_eq!(message(&text, None), "line 4, column FEB: \"n/a\" is not a number; write it as 23.1");
        let text = table(10).replacen("1952", "1953", 1);
        assert!(message(&text, None).starts_with("line 4, column YEAR: found year 1953, expected 1952"));
        assert!(message("1\n2\n", None).contains("too few"));
        assert!(message("", None).contains("empty"));
    }

    #[test]
    fn one_value_a_row_with_and_without_a_header() {
        let plain = lines((0..120).map(|value: i32| value.to_string()));
        assert_eq!(parse(plain.as_bytes(), None).unwrap().values[119].to_bits(), 119f64.to_bits());
        let named = "when,sst\n".to_owned() + &lines((0..120).map(|value| format!("x{value},{value}")));
        let series = parse(named.as_bytes(), Some("SST")).unwrap();
        assert_eq!((series.values.len(), series.first_year), (120, None));
        assert_eq!(series.split(None).unwrap(), 96);
        assert!(message(&named, Some("salt")).contains("no column salt; choose one of when, sst"));
        assert!(message(&named, None).contains("2 columns; choose one with --column"));
    }
}
