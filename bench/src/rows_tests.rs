//! Tests of the rows: what is divided by what.

use super::*;

fn measured(arm: &str, cpu: f64) -> Measured {
    let parts = Parts { bare_forward: 1.0, forward: 1.0, until_last_save: 1.0, backward: 2.0 };
    Measured {
        workload: Workload::Tiny,
        arm: arm.to_owned(),
        blocks: 10,
        threads: 1,
        wall_min: cpu * 2.0,
        wall_median: cpu * 3.0,
        cpu_min: cpu,
        cpu_median: cpu * 1.5,
        peak_mb: 10.0,
        page_faults: 5,
        loss: 0.0,
        grad_norm: 1.0,
        saved_bytes: None,
        gradients: None,
        parts: (arm == "plain").then_some(parts),
        torch: String::new(),
    }
}

fn rounds(values: &[[f64; 4]]) -> Rounds {
    let arms = ["plain", "replay", "python-plain", "nonreentrant"];
    let round = |values: &[f64; 4]| {
        arms.iter().zip(values).map(|(arm, &cpu)| ((*arm).to_owned(), measured(arm, cpu))).collect()
    };
    Rounds { all: values.iter().map(round).collect(), repeated: 0, noisy: 0 }
}

fn of_arm(arm: &str, rounds: &Rounds) -> Row {
    row(Workload::Tiny, arm, rounds, None).unwrap()
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-12, "{a} != {b}");
}

#[test]
fn a_ratio_is_one_of_the_same_round() {
    // The second round is three times slower in all its arms: the median of seconds would be no ratio of anything.
    let rounds = rounds(&[[1.0, 1.5, 1.0, 2.0], [3.0, 4.2, 3.0, 6.6], [1.0, 1.3, 1.0, 2.1]]);
    let row = of_arm("replay", &rounds);
    close(row.ratio_to_plain, 1.4);
    close(row.ratio_least, 1.3);
    close(row.ratio_most, 1.5);
    close(row.cpu_median, 1.5);
    close(row.overhead_us, 0.5 / 10.0 * 1e6);
    close(row.predicted_ratio.unwrap(), 4.0 / 3.0);
}

#[test]
fn a_peer_is_measured_by_its_own_plain_arm() {
    let rounds = rounds(&[[1.0, 1.2, 2.0, 3.0]]);
    close(of_arm("nonreentrant", &rounds).ratio_to_plain, 1.5);
    close(of_arm("replay", &rounds).ratio_to_peers["nonreentrant"], 0.8);
    close(of_arm("replay", &rounds).ratio_to_peers["python-plain"], 1.2);
    assert!(of_arm("nonreentrant", &rounds).ratio_to_peers.is_empty());
}

#[test]
fn a_wrong_gradient_is_an_error() {
    let checked = |hash: &str| Checked {
        workload: Workload::Tiny,
        arm: "replay".to_owned(),
        blocks: 10,
        live_peak_mb: 1.0,
        saved_bytes: Some(1),
        graph_bytes: Some(2),
        gradient_bytes_copied: Some(0),
        gradients: hash.to_owned(),
        plain_gradients: "right".to_owned(),
        relative_difference: 1e-7,
    };
    let arms = ["plain".to_owned(), "replay".to_owned()];
    let rounds = rounds(&[[1.0, 1.2, 1.0, 1.0]]);
    let rows = rows(Workload::Tiny, &arms, &rounds, &[checked("right")]).unwrap();
    assert_eq!(rows[1].gradients.as_deref(), Some("right"));
    let error = super::rows(Workload::Tiny, &arms, &rounds, &[checked("wrong")]).unwrap_err().to_string();
    assert!(error.starts_with("WRONG GRADIENTS: `replay` of tiny with 10 blocks"), "{error}");
}

#[test]
fn medians() {
    close(median([3.0, 1.0, 2.0].into_iter()), 2.0);
    close(median([4.0, 1.0].into_iter()), 2.5);
}
