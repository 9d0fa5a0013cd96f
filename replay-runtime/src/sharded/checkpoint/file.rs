//! Files of the safetensors format, written and read tensor by tensor: no more than one is in memory.
//!
//! Source of the format: <https://github.com/huggingface/safetensors#format>. The crate's own functions want all of a file in
//! memory to read it, and all tensors at once to write it.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use tch::{Device, Kind, Tensor};

use super::error::{CheckpointError, Result, damaged, differs, io, torch};

/// A header is not larger: the crate's own limit.
const MAX_HEADER: u64 = 100_000_000;
/// Elements that are copied at once.
const PART: i64 = 1 << 20;

/// A tensor that will be in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) shape: Vec<i64>,
}

impl Item {
    pub(super) fn of(name: String, tensor: &Tensor) -> Self {
        Self { name, kind: tensor.kind(), shape: tensor.size() }
    }

    fn info(&self, begin: usize) -> Result<TensorInfo> {
        let dtype = Dtype::try_from(self.kind)
            .map_err(|_| CheckpointError::Kind { variable: self.name.clone(), kind: format!("{:?}", self.kind) })?;
        let shape: Vec<_> =
            self.shape.iter().map(|&size| usize::try_from(size).expect("sizes are not negative")).collect();
        let end = begin + shape.iter().product::<usize>() * dtype.size();
        Ok(TensorInfo { dtype, shape, data_offsets: (begin, end) })
    }
}

/// The order of tensors in a file: the largest elements first, so that all are aligned.
pub(super) fn sort<T>(items: &mut [T], item: impl Fn(&T) -> &Item) {
    items.sort_by(|a, b| {
        let (a, b) = (item(a), item(b));
        b.kind.elt_size_in_bytes().cmp(&a.kind.elt_size_in_bytes()).then_with(|| a.name.cmp(&b.name))
    });
}

/// Of the tensors of a header, by number; what is announced must be written.
pub(super) struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    bytes: u64,
    /// Where the file must end.
    end: u64,
}

impl Writer {
    /// A new file of these tensors, in this order.
    pub(super) fn create<'i>(
        path: &Path,
        items: impl IntoIterator<Item = &'i Item>,
        notes: &HashMap<String, String>,
    ) -> Result<Self> {
        let (mut header, mut at) = (serde_json::Map::new(), 0);
        let json = |value: serde_json::Result<serde_json::Value>| {
            value.map_err(|error| damaged(path, format!("cannot have this header: {error}")))
        };
        header.insert("__metadata__".to_owned(), json(serde_json::to_value(notes))?);
        for item in items {
            let info = item.info(at)?;
            at = info.data_offsets.1;
            header.insert(item.name.clone(), json(serde_json::to_value(&info))?);
        }
        let mut text = serde_json::Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let file = File::create(path).map_err(io("create", path))?;
        let end = (8 + text.len() + at) as u64;
        let mut writer = Self { path: path.to_owned(), file: BufWriter::new(file), bytes: 0, end };
        writer.put(&(text.len() as u64).to_le_bytes())?;
        writer.put(&text)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(io("write to", &self.path))?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// The next tensor's values.
    pub(super) fn write(&mut self, tensor: &Tensor) -> Result<()> {
        let copy = torch("copy a tensor");
        let flat = tensor.detach().to_device(Device::Cpu).reshape(-1);
        let (numel, size) = (flat.size()[0], flat.kind().elt_size_in_bytes());
        let mut bytes = Vec::new();
        for first in (0..numel).step_by(usize::try_from(PART).expect("a few millions")) {
            let part = flat.narrow(0, first, PART.min(numel - first)).contiguous();
            bytes.resize(part.numel() * size, 0);
            part.f_copy_data_u8(&mut bytes, part.numel()).map_err(&copy)?;
            self.put(&bytes)?;
        }
        Ok(())
    }

    /// All that was written is on the disk. How many bytes.
    pub(super) fn finish(self) -> Result<u64> {
        assert_eq!(self.bytes, self.end, "what was announced is written");
        let file = self.file.into_inner().map_err(|error| io("write to", &self.path)(error.into_error()))?;
        file.sync_all().map_err(io("write to", &self.path))?;
        Ok(self.bytes)
    }
}

/// The names in a folder are on the disk.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    // An empty one is where the program was started.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    match File::open(path).and_then(|folder| folder.sync_all()) {
        // Some file systems cannot, and need not.
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        outcome => outcome.map_err(io("write to", path)),
    }
}

/// A file whose header was read.
pub(super) struct Reader {
    path: PathBuf,
    file: File,
    /// Where the tensors begin.
    start: u64,
    tensors: BTreeMap<String, TensorInfo>,
    notes: HashMap<String, String>,
    pub(super) bytes: u64,
}

impl Reader {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(io("open", path))?;
        let bytes = file.metadata().map_err(io("read", path))?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(io("read", path))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER.min(bytes) {
            return Err(damaged(path, "is no safetensors file"));
        }
        let mut header = vec![0; usize::try_from(length).expect("not so large")];
        file.read_exact(&mut header).map_err(io("read", path))?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| damaged(path, format!("is no safetensors file: {error}")))?;
        let start = 8 + length;
        let tensors: BTreeMap<_, _> = header.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        let notes = header.metadata().clone().unwrap_or_default();
        let reader = Self { path: path.to_owned(), file, start, tensors, notes, bytes };
        reader.check()?;
        Ok(reader)
    }

    /// Whether each tensor is as long as its shape says, and inside of the file.
    fn check(&self) -> Result<()> {
        let mut end = self.start;
        for (name, info) in &self.tensors {
            let (from, to) = info.data_offsets;
            let elements = info.shape.iter().try_fold(1usize, |all, &size| all.checked_mul(size));
            let length = elements.and_then(|elements| elements.checked_mul(info.dtype.size()));
            let last = (to as u64).checked_add(self.start);
            let too_large = info.shape.iter().any(|&size| i64::try_from(size).is_err());
            if too_large || to.checked_sub(from).is_none_or(|found| Some(found) != length) || last.is_none() {
                return Err(damaged(&self.path, format!("says that `{name}` is where it cannot be")));
            }
            end = end.max(last.unwrap_or_default());
        }
        if end != self.bytes {
            return Err(damaged(&self.path, format!("has {} bytes, and should have {end}", self.bytes)));
        }
        Ok(())
    }

    pub(super) fn note(&self, key: &str) -> Option<&str> {
        self.notes.get(key).map(String::as_str)
    }

    /// The tensor's shape, and its kind.
    pub(super) fn item(&self, name: &str) -> Result<Item> {
        let info = self.info(name)?;
        let kind = Kind::try_from(info.dtype).map_err(torch("read a kind"))?;
        let shape = info.shape.iter().map(|&size| i64::try_from(size).expect("checked against the file")).collect();
        Ok(Item { name: name.to_owned(), kind, shape })
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors.get(name).ok_or_else(|| differs(&self.path, format!("it has no `{name}`")))
    }

    /// So many elements of a tensor from the `first` on, in the order of its elements.
    pub(super) fn read(&mut self, name: &str, first: i64, count: i64) -> Result<Tensor> {
        let kind = self.item(name)?.kind;
        let info = self.info(name)?;
        let number = |count: i64| u64::try_from(count).expect("a place in a tensor");
        let size = info.dtype.size() as u64;
        let (from, to) = info.data_offsets;
        let at = from as u64 + number(first) * size;
        let length = number(count) * size;
        if at + length > to as u64 {
            let problem =
                format!("has {} bytes of `{name}`, and {} are wanted", to - from, number(first + count) * size);
            return Err(damaged(&self.path, problem));
        }
        self.file.seek(SeekFrom::Start(self.start + at)).map_err(io("read", &self.path))?;
        let mut bytes = vec![0; usize::try_from(length).expect("it is in the file")];
        self.file.read_exact(&mut bytes).map_err(io("read", &self.path))?;
        Tensor::f_from_data_size(&bytes, &[count], kind).map_err(torch("make a tensor"))
    }
}
