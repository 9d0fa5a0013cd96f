//! What torchrun tells a process.

use std::str::FromStr;

use super::{DistBuilder, DistError};

/// The variables by name.
pub(super) type Lookup<'v> = &'v dyn Fn(&str) -> Option<String>;

/// Gloo's own variable.
const INTERFACE: &str = "GLOO_SOCKET_IFNAME";

/// The builder for what the variables say.
pub(super) fn read(lookup: Lookup<'_>) -> Result<DistBuilder, DistError> {
    let (rank, world) = (number(lookup, "RANK")?, number(lookup, "WORLD_SIZE")?);
    let mut builder = DistBuilder::new(rank, world);
    builder.local_rank = if lookup("LOCAL_RANK").is_some() { number(lookup, "LOCAL_RANK")? } else { rank };
    if world > 1 {
        let host = lookup("MASTER_ADDR").ok_or_else(|| missing("MASTER_ADDR"))?;
        builder = builder.tcp(&host, number(lookup, "MASTER_PORT")?);
    }
    // The agent serves the store then, and rank 0 must not.
    builder.agent = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    // A restarted group must not read the notes of the one before.
    let of_run = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"].map(|name| lookup(name).unwrap_or_default());
    Ok(builder.prefix(&format!("replay/{}/{}", of_run[0], of_run[1])))
}

/// What to look at first where ranks on several machines do not find each other: left to itself, Gloo takes the address that the
/// machine's own name stands for, and where that is none of the machine's, the one that leads nowhere else. Empty on one machine.
pub(super) fn network(lookup: Lookup<'_>) -> String {
    let count = |name: &str| lookup(name).and_then(|text| text.parse::<usize>().ok());
    let agents = count("GROUP_WORLD_SIZE").is_some_and(|machines| machines > 1);
    let local = count("LOCAL_WORLD_SIZE").zip(count("WORLD_SIZE")).is_some_and(|(local, all)| local < all);
    if !agents && !local {
        return String::new();
    }
    let now = lookup(INTERFACE).map_or_else(|| "not set".to_owned(), |name| format!("`{name}`"));
    format!(
        "\nthe ranks are on several machines: {INTERFACE}, here {now}, must name the network interface that leads to the others, on each machine its own"
    )
}

fn missing(variable: &'static str) -> DistError {
    DistError::Environment { variable, problem: "is not set".to_owned() }
}

fn number<T: FromStr>(lookup: Lookup<'_>, variable: &'static str) -> Result<T, DistError> {
    let text = lookup(variable).ok_or_else(|| missing(variable))?;
    text.parse()
        .map_err(|_| DistError::Environment { variable, problem: format!("is `{text}`, which is no number here") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::builder::Place;

    const RUN: [(&str, &str); 7] = [
        ("RANK", "1"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RUN_ID", "job"),
        ("TORCHELASTIC_RESTART_COUNT", "3"),
    ];

    fn with(changes: &[(&'static str, Option<&'static str>)]) -> Result<DistBuilder, DistError> {
        let lookup = |name: &str| match changes.iter().find(|(changed, _)| *changed == name) {
            Some((_, value)) => value.map(str::to_owned),
            None => RUN.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()),
        };
        read(&lookup)
    }

    #[test]
    fn torchruns_variables() {
        let builder = with(&[]).unwrap();
        assert_eq!((builder.rank, builder.world, builder.local_rank, builder.agent), (1, 2, 0, false));
        assert_eq!(builder.place, Some(Place::Tcp("node0".to_owned(), 29500)));
        assert_eq!(builder.prefix, "replay/job/3");
        assert!(with(&[("TORCHELASTIC_USE_AGENT_STORE", Some("True"))]).unwrap().agent);
        assert!(!with(&[("TORCHELASTIC_USE_AGENT_STORE", Some("False"))]).unwrap().agent);
    }

    #[test]
    fn one_process_needs_no_address() {
        let builder = with(&[("WORLD_SIZE", Some("1")), ("RANK", Some("0")), ("MASTER_ADDR", None)]).unwrap();
        assert_eq!((builder.world, builder.place), (1, None));
        assert_eq!(with(&[("LOCAL_RANK", None)]).unwrap().local_rank, 1);
    }

    #[test]
    fn several_machines_are_told_to_name_their_network() {
        let advice = |variables: &[(&str, &str)]| {
            let found = |name: &str| variables.iter().find(|(known, _)| *known == name);
            network(&|name| found(name).map(|(_, value)| (*value).to_owned()))
        };
        for one in [&[][..], &[("GROUP_WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "2")]] {
            assert_eq!(advice(one), "");
        }
        for several in
            [[("GROUP_WORLD_SIZE", "2"), ("WORLD_SIZE", "2")], [("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "4")]]
        {
            assert!(advice(&several).contains("GLOO_SOCKET_IFNAME, here not set, must name"));
        }
        let text = advice(&[("GROUP_WORLD_SIZE", "2"), ("GLOO_SOCKET_IFNAME", "lo")]);
        assert!(text.contains("GLOO_SOCKET_IFNAME, here `lo`, must name"), "{text}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for variable in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            let text = with(&[(variable, None)]).unwrap_err().to_string();
            assert!(text.contains(&format!("{variable} is not set")), "{text}");
        }
        for (variable, value) in [("RANK", "one"), ("RANK", "-1"), ("MASTER_PORT", "99999"), ("LOCAL_RANK", "")] {
            let text = with(&[(variable, Some(value))]).unwrap_err().to_string();
            assert!(text.contains(&format!("{variable} is `{value}`")), "{text}");
        }
    }
}
