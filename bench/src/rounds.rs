//! The rounds: every arm once in each, in processes of their own, so that all meet the same noise.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::arm::Measured;
use crate::launch::{Launcher, PEERS};
use crate::modes::Mode;
use crate::workload::Workload;

/// The answers of one round, by arm.
pub(crate) type Round = BTreeMap<String, Measured>;

/// What the rounds of one workload gave.
#[derive(Debug)]
pub(crate) struct Rounds {
    pub(crate) all: Vec<Round>,
    /// Rounds that were run again, since their two plain processes differed too much.
    pub(crate) repeated: usize,
    /// Rounds that still differed too much after the last attempt, and count nevertheless.
    pub(crate) noisy: usize,
}

/// How far the two plain processes of a round may differ.
const NOISE: f64 = 0.15;
/// How often a round is run again.
const ATTEMPTS: usize = 3;

/// The arms of a workload: both plain ones stand at the ends of a round.
pub(crate) fn arms(workload: Workload, launcher: &Launcher, wanted: &[String]) -> Vec<String> {
    let ours = Mode::arms().map(str::to_owned);
    let peers = PEERS.iter().filter(|_| launcher.peers.is_some() && workload.has_peers());
    let theirs = peers.map(|(name, _)| (*name).to_owned());
    let always = |arm: &String| arm.starts_with("plain") || arm == "python-plain";
    ours.chain(theirs).filter(|arm| wanted.is_empty() || always(arm) || wanted.contains(arm)).collect()
}

/// Runs all rounds of one workload.
pub(crate) fn run(
    launcher: &Launcher,
    workload: Workload,
    blocks: i64,
    arms: &[String],
    rounds: usize,
) -> Result<Rounds> {
    let mut result = Rounds { all: Vec::new(), repeated: 0, noisy: 0 };
    for number in 0..rounds {
        let mut attempt = 0;
        loop {
            let round = one(launcher, workload, blocks, &order(arms, number))?;
            let noise = noise(&round);
            eprintln!(
                "{}: round {} of {rounds}, plain twice: {:.1} % apart",
                workload.name(),
                number + 1,
                noise * 100.0
            );
            if noise <= NOISE || attempt == ATTEMPTS {
                result.noisy += usize::from(noise > NOISE);
                result.all.push(round);
                break;
            }
            attempt += 1;
            result.repeated += 1;
        }
    }
    Ok(result)
}

fn one(launcher: &Launcher, workload: Workload, blocks: i64, order: &[&String]) -> Result<Round> {
    order.iter().map(|&arm| Ok((arm.clone(), launcher.time(workload, arm, blocks)?))).collect()
}

/// Plain first and again last; those between take turns.
fn order(arms: &[String], round: usize) -> Vec<&String> {
    let is = |name: &'static str| move |arm: &&String| *arm == name;
    let mut between: Vec<_> = arms.iter().filter(|arm| !arm.starts_with("plain")).collect();
    if !between.is_empty() {
        let turns = round % between.len();
        between.rotate_left(turns);
    }
    arms.iter().filter(is("plain")).chain(between).chain(arms.iter().filter(is("plain-again"))).collect()
}

/// How far the two plain processes differ, as a part of the faster one.
fn noise(round: &Round) -> f64 {
    let (Some(a), Some(b)) = (round.get("plain"), round.get("plain-again")) else { return 0.0 };
    (a.cpu_min - b.cpu_min).abs() / a.cpu_min.min(b.cpu_min)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    #[test]
    fn plain_stands_at_both_ends_and_the_others_take_turns() {
        let arms = words(&["plain", "plain-again", "replay", "replay+full", "python-plain"]);
        let order = |round| order(&arms, round).into_iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(order(0), ["plain", "replay", "replay+full", "python-plain", "plain-again"]);
        assert_eq!(order(4), ["plain", "replay+full", "python-plain", "replay", "plain-again"]);
    }

    #[test]
    fn the_plain_arms_always_run() {
        let launcher = Launcher { threads: 1, repeats: 1, peers: None, variables: Vec::new() };
        let wanted = words(&["replay+full"]);
        assert_eq!(arms(Workload::Tiny, &launcher, &wanted), ["plain", "plain-again", "replay+full"]);
    }
}
