//! What ranks tell each other before each operation: a record of one size, whatever the operation, so that ranks that do not
//! agree find out before anything else is sent.

use std::fmt;

/// Bytes of a record.
pub(super) const SIZE: usize = 128;
/// Bytes that an operation may use for its own purposes.
pub(crate) const WORDS: usize = 40;
const TEXT: usize = 56;
const MAGIC: [u8; 4] = *b"rply";

/// What a rank is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Operation {
    /// Compare what was built.
    Build = 1,
    /// Take over rank 0's parameters and buffers.
    Broadcast,
    /// Bring the parameters of a unit together.
    Gather,
    /// Add up the gradients of a unit.
    Reduce,
    /// Tell each other a number, as for the norm of the gradients.
    AllGather,
    /// Wait for all ranks.
    Barrier,
    /// Agree on a number of steps.
    AgreeSteps,
    /// See what parameters can be on their way early.
    Prefetch,
    /// Write a checkpoint of pieces.
    Save,
    /// Read a checkpoint of pieces.
    Load,
    /// Write whole parameters.
    SaveFull,
    /// Read whole parameters.
    LoadFull,
    /// Show whole parameters.
    SummonFull,
    /// Nothing more: the rank is done.
    Shutdown,
    /// Nothing more: the rank has failed.
    Abort,
}

impl Operation {
    const ALL: [Self; 15] = [
        Self::Build,
        Self::Broadcast,
        Self::Gather,
        Self::Reduce,
        Self::AllGather,
        Self::Barrier,
        Self::AgreeSteps,
        Self::Prefetch,
        Self::Save,
        Self::Load,
        Self::SaveFull,
        Self::LoadFull,
        Self::SummonFull,
        Self::Shutdown,
        Self::Abort,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| *operation as u8 == number)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Build => "build",
            Self::Broadcast => "broadcast",
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::AllGather => "all_gather",
            Self::Barrier => "barrier",
            Self::AgreeSteps => "agree_steps",
            Self::Prefetch => "prefetch",
            Self::Save => "save_sharded",
            Self::Load => "load_sharded",
            Self::SaveFull => "save_full",
            Self::LoadFull => "load_full",
            Self::SummonFull => "summon_full",
            Self::Shutdown => "shutdown",
            Self::Abort => "abort",
        })
    }
}

/// One rank's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// How many operations came before.
    pub(super) sequence: u64,
    pub(super) operation: Operation,
    /// The number of the unit, as all ranks have built them; `None` where it is about no unit.
    pub(super) unit: Option<u32>,
    /// How many bytes the rank expects from each other one.
    pub(super) bytes: u64,
    /// For the operation itself; need not agree.
    pub(crate) words: [u8; WORDS],
    /// Why the rank has failed.
    pub(super) text: String,
}

impl Header {
    pub(super) fn encode(&self) -> [u8; SIZE] {
        let mut out = [0; SIZE];
        let unit = self.unit.map_or(0, |unit| unit + 1);
        let text = cut(&self.text, TEXT).as_bytes();
        let parts: [&[u8]; 7] = [
            &MAGIC,
            &unit.to_le_bytes(),
            &self.sequence.to_le_bytes(),
            &self.bytes.to_le_bytes(),
            &[self.operation as u8, u8::try_from(text.len()).unwrap_or(0), 0, 0, 0, 0, 0, 0],
            &self.words,
            text,
        ];
        let mut at = 0;
        for part in parts {
            out[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        out
    }

    /// `None` where these are no bytes of a record.
    pub(super) fn decode(bytes: &[u8; SIZE]) -> Option<Self> {
        let four = |at: usize| bytes[at..at + 4].try_into().map(u32::from_le_bytes).ok();
        let eight = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).ok();
        let (length, words, text) = (usize::from(bytes[25]), 32, 32 + WORDS);
        if bytes[..4] != MAGIC || length > TEXT {
            return None;
        }
        Some(Self {
            unit: four(4)?.checked_sub(1),
            sequence: eight(8)?,
            bytes: eight(16)?,
            operation: Operation::of(bytes[24])?,
            words: bytes[words..text].try_into().ok()?,
            text: String::from_utf8_lossy(&bytes[text..text + length]).into_owned(),
        })
    }

    /// Whether two ranks are about to do the same.
    pub(super) fn agrees(&self, other: &Self) -> bool {
        let key = |header: &Self| (header.sequence, header.operation, header.unit, header.bytes);
        key(self) == key(other)
    }
}

/// As much of it as fits into so many bytes.
fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let mut words = [0; WORDS];
        words[0] = 3;
        words[WORDS - 1] = 250;
        let text = "the pump broke".to_owned();
        Header { sequence: 7 << 40, operation: Operation::Reduce, unit: Some(0), bytes: 1 << 33, words, text }
    }

    #[test]
    fn a_record_comes_back() {
        for operation in Operation::ALL {
            let sent = Header { operation, ..header() };
            assert_eq!(Header::decode(&sent.encode()), Some(sent));
        }
        let sent = Header { unit: None, text: String::new(), ..header() };
        assert_eq!(Header::decode(&sent.encode()), Some(sent));
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        for text in ["x".repeat(200), "ä".repeat(100), format!("x{}", "→".repeat(40))] {
            let sent = Header { text: text.clone(), ..header() };
            let found = Header::decode(&sent.encode()).unwrap().text;
            assert!(text.starts_with(&found) && found.len() > TEXT - 4, "{found}");
        }
    }

    #[test]
    fn other_bytes_are_no_record() {
        assert_eq!(Header::decode(&[0; SIZE]), None);
        for (at, value) in [(0, 0), (24, 0), (24, 99), (25, 255)] {
            let mut bytes = header().encode();
            bytes[at] = value;
            assert_eq!(Header::decode(&bytes), None, "byte {at}");
        }
    }

    #[test]
    fn what_has_to_agree() {
        let same = Header { words: [9; WORDS], text: "other".to_owned(), ..header() };
        assert!(header().agrees(&same));
        for other in [
            Header { sequence: 1, ..header() },
            Header { operation: Operation::Gather, ..header() },
            Header { unit: Some(1), ..header() },
            Header { unit: None, ..header() },
            Header { bytes: 0, ..header() },
        ] {
            assert!(!header().agrees(&other), "{other:?}");
        }
    }
}
