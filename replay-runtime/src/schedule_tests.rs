//! The schedule run without a chain: what it counts against the formula, a search through all schedules, and a table.

use super::*;

/// The least number of advances, by the formula of the source.
fn formula(len: usize, slots: usize) -> usize {
    let r = (0..len).find(|r| binomial(slots + r, slots) >= len).expect("there is one");
    if r == 0 { 0 } else { r * len - binomial(slots + r, r - 1) }
}

/// The least number of advances, tried out: `least[slots][len]` for all up to the given ones.
fn search(len: usize, slots: usize) -> Vec<Vec<usize>> {
    let mut least = vec![vec![0; len + 1]; slots + 1];
    for s in 1..=slots {
        for l in 2..=len {
            // Without a slot for another input, each step is reached from the first one.
            let alone = l * (l - 1) / 2;
            let split = |m: usize| m + least[s - 1][l - m] + least[s][m];
            let best = if s == 1 { None } else { (1..l).map(split).min() };
            least[s][l] = best.map_or(alone, |best| best.min(alone));
        }
    }
    least
}

/// Runs the schedule: advances of the forward and of the backward pass. Checks that each leg begins at a stored input or
/// where the one before it ended, and that slots suffice.
fn run(len: usize, slots: usize) -> (usize, usize) {
    let mut schedule = Slots::new(len, slots);
    for step in 0..len {
        assert_eq!(schedule.stores(step), schedule.holds(step));
    }
    assert!(schedule.holds(0));
    let mut backward = 0;
    for step in (0..len).rev() {
        // The last one's input is at hand when the forward ends.
        if step + 1 < len && !schedule.holds(step) {
            let mut at = None;
            let before = schedule.taken.clone();
            for leg in schedule.legs(step) {
                assert!(leg.from < leg.to && leg.to <= step);
                assert!(at.map_or(before.last() == Some(&leg.from), |at| at == leg.from));
                at = Some(leg.to);
                backward += leg.to - leg.from;
                assert_eq!(leg.stored, schedule.holds(leg.to));
            }
            assert_eq!(at, Some(step));
        }
        assert!(schedule.taken.len() <= slots, "{} stored in {slots} slots", schedule.taken.len());
        assert!(schedule.taken.is_sorted());
        schedule.free_from(step);
    }
    assert!(schedule.taken.is_empty());
    (len - 1, backward)
}

#[test]
fn the_formula_is_the_least_of_all_schedules() {
    let least = search(39, 8);
    for (slots, row) in least.iter().enumerate().skip(1) {
        for (len, least) in row.iter().enumerate().skip(1) {
            assert_eq!(formula(len, slots), *least, "{len} steps, {slots} slots");
        }
    }
}

#[test]
fn the_schedule_advances_as_often_as_the_formula_says() {
    let lengths = (1..150).chain([256, 999, 1024, 5000]);
    for len in lengths {
        for slots in (1..12).chain([16, 32, 149, 150, 6000]) {
            let (forward, backward) = run(len, slots);
            assert_eq!(forward + backward, formula(len, slots), "{len} steps, {slots} slots");
        }
    }
}

/// Advances that all steps have in a slot of their own: those of the forward.
#[test]
fn with_a_slot_for_each_step_nothing_runs_again() {
    for (len, slots) in [(1, 1), (2, 2), (7, 7), (7, 100), (1000, 1000)] {
        assert_eq!(run(len, slots), (len - 1, 0));
    }
}

#[test]
fn one_slot_starts_from_the_first_input_each_time() {
    assert_eq!(run(100, 1), (99, 98 * 99 / 2));
}

/// Time against plain backpropagation, where a backward takes twice a forward, the last step's graph being kept. `None`:
/// there are more slots than steps.
#[test]
#[expect(clippy::cast_precision_loss, reason = "small numbers")]
fn ratios_to_plain_backpropagation() {
    const SLOTS: [usize; 8] = [1, 2, 3, 4, 6, 8, 16, 32];
    const TABLE: [(usize, [&str; 9]); 6] = [
        (8, ["2.17", "1.58", "1.46", "1.42", "1.33", "1.29", "-", "-", "1.29"]),
        (16, ["3.50", "1.94", "1.69", "1.56", "1.50", "1.46", "1.31", "-", "1.31"]),
        (21, ["4.33", "2.11", "1.78", "1.67", "1.54", "1.51", "1.38", "-", "1.32"]),
        (64, ["11.50", "3.19", "2.34", "2.04", "1.81", "1.71", "1.57", "1.49", "1.33"]),
        (256, ["43.50", "5.70", "3.40", "2.73", "2.24", "2.05", "1.78", "1.62", "1.33"]),
        (1024, ["171.50", "10.73", "5.09", "3.69", "2.77", "2.43", "1.96", "1.81", "1.33"]),
    ];
    for (len, row) in TABLE {
        for (slots, expected) in SLOTS.into_iter().chain([len]).zip(row) {
            if expected == "-" {
                assert!(slots > len);
                continue;
            }
            let (forward, backward) = run(len, slots);
            let ratio = (forward + backward + 3 * len) as f64 / (3 * len) as f64;
            assert_eq!(format!("{ratio:.2}"), expected, "{len} steps, {slots} slots");
        }
    }
}

#[test]
fn a_chain_that_ends_early_costs_what_it_ran() {
    let mut schedule = Slots::new(usize::MAX, usize::MAX - 1);
    assert!((0..100).all(|step| schedule.stores(step)));
    assert_eq!(schedule.taken.len(), 100);
}

#[test]
fn binomials_that_do_not_fit_are_the_largest_number() {
    assert_eq!(binomial(0, 0), 1);
    assert_eq!(binomial(10, 3), 120);
    assert_eq!(binomial(62, 31), 465_428_353_255_261_088);
    assert_eq!(binomial(200, 100), usize::MAX);
    assert_eq!(binomial(usize::MAX, 2), usize::MAX);
}
