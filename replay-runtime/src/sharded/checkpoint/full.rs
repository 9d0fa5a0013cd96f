//! Whole parameters, one after the other, for programs that know nothing of pieces.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use tch::{Device, Tensor};

use super::error::{Result, differs, io, torch};
use super::file::{Item, Reader, Writer, sort, sync_folder};
use crate::dist::{DistError, Operation};
use crate::ffi::Works;
use crate::sharded::spare::Spare;
use crate::sharded::{Param, Sharded};

/// A variable of the model.
enum Variable<'s> {
    Cut(&'s Param),
    Whole(&'s Tensor),
}

impl Sharded<'_> {
    /// Writes all variables, whole, as a safetensors file with the names of the [`VarStore`](tch::nn::VarStore): rank 0 writes, and of
    /// those that each rank has for itself (buffers, ignored ones) it writes its own. `VarStore::load` reads it. One parameter
    /// at a time is whole. A file of that name is replaced when the new one is on the disk. Collective.
    ///
    /// # Errors
    /// See [`CheckpointError`](crate::CheckpointError): of any rank, on all ranks. Then a file of that name is as it was.
    pub fn save_full(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (first, work) = (self.dist.rank() == 0, path.with_added_extension("tmp"));
        let variables = self.variables();
        let create = || {
            self.check_closed()?;
            let items = variables.iter().map(|(item, _)| item);
            first.then(|| Writer::create(&work, items, &HashMap::new())).transpose()
        };
        let outcome = self.save_variables(&variables, create()).and_then(|written| {
            let publish = || {
                fs::rename(&work, path).map_err(io("create", path))?;
                sync_folder(path.parent().unwrap_or(Path::new("")))
            };
            let published = written.and_then(|()| if first { publish() } else { Ok(()) });
            self.all_done(Operation::SaveFull, published.map(|()| [])).map(drop)
        });
        if first && outcome.is_err() {
            let _ = fs::remove_file(&work);
        }
        outcome
    }

    /// Before each parameter all ranks hear whether the file has taken what came before. Whether it has taken all of it.
    fn save_variables(&self, variables: &[(Item, Variable<'_>)], writer: Result<Option<Writer>>) -> Result<Result<()>> {
        let (mut writer, mut so_far) = match writer {
            Ok(writer) => (writer, Ok(())),
            Err(error) => (None, Err(error)),
        };
        let mut write = |whole: &Tensor| writer.as_mut().map_or(Ok(()), |writer| writer.write(whole));
        for (_, variable) in variables {
            match variable {
                Variable::Cut(param) => {
                    self.all_done(Operation::SaveFull, so_far.map(|()| []))?;
                    so_far = write(&self.whole_of(param, Operation::SaveFull)?);
                }
                Variable::Whole(tensor) => so_far = so_far.and_then(|()| write(tensor)),
            }
        }
        Ok(so_far.and_then(|()| writer.map_or(Ok(()), |writer| writer.finish().map(drop))))
    }

    /// Takes over all variables from a safetensors file that rank 0 sees: of [`save_full`](Self::save_full), or any other with these
    /// names and shapes; other kinds are converted, and what the model does not have is left aside. One
    /// parameter at a time is whole. What an optimizer knows stays as it is. Collective.
    ///
    /// # Errors
    /// See [`CheckpointError`](crate::CheckpointError): of any rank, on all ranks, before anything is changed.
    pub fn load_full(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let variables = self.variables();
        let open = || {
            self.check_closed()?;
            let mut reader = (self.dist.rank() == 0).then(|| Reader::open(path)).transpose()?;
            if let Some(reader) = &mut reader {
                check(path, reader, &variables)?;
                self.check_ties(path, reader)?;
            }
            Ok(reader)
        };
        let (mut reader, mut so_far) = match open() {
            Ok(reader) => (reader, Ok(())),
            Err(error) => (None, Err(error)),
        };
        let mut found = Vec::new();
        for (item, variable) in &variables {
            let read = so_far.and_then(|()| reader.as_mut().map(|reader| read(reader, item)).transpose());
            let (value, own) = match read {
                Ok(value) => (value, Ok([])),
                Err(error) => (None, Err(error)),
            };
            self.all_done(Operation::LoadFull, own)?;
            let whole = value.unwrap_or_else(|| Tensor::empty(&item.shape[..], (item.kind, Device::Cpu)));
            if let Some(group) = self.dist.group().filter(|_| whole.numel() > 0) {
                let outcome = group.broadcast(&whole, 0);
                outcome.map_err(|error| self.dist.lost(Operation::LoadFull, None, error))?;
            }
            found.push(match variable {
                Variable::Cut(param) => whole.view(-1).narrow(0, param.first(), param.own).copy(),
                Variable::Whole(_) => whole,
            });
            so_far = Ok(());
        }
        let copy = torch("copy into a variable");
        let taken = tch::no_grad(|| {
            variables.iter().zip(&found).try_for_each(|((_, variable), value)| {
                let mut into = match variable {
                    Variable::Cut(param) => param.own_piece(),
                    Variable::Whole(tensor) => tensor.shallow_clone(),
                };
                into.f_copy_(value).map(drop).map_err(&copy)
            })
        });
        self.all_done(Operation::LoadFull, taken.map(|()| [])).map(drop)
    }

    /// Each variable whole, by name, one after the other: to evaluate, to count, to print. Collective: `visit` is called on all ranks.
    ///
    /// What it is given are copies of parameters, and the variables themselves that are whole everywhere.
    ///
    /// # Errors
    /// See [`CheckpointError`](crate::CheckpointError).
    pub fn summon_full(&self, mut visit: impl FnMut(&str, &Tensor)) -> Result<()> {
        let mut so_far = self.check_closed();
        for (item, variable) in self.variables() {
            match variable {
                Variable::Cut(param) => {
                    self.all_done(Operation::SummonFull, so_far.map(|()| []))?;
                    let whole = self.whole_of(param, Operation::SummonFull)?;
                    // In a world of one it is the piece itself.
                    let whole = if self.dist.world() == 1 { whole.copy() } else { whole };
                    visit(&item.name, &whole);
                    so_far = Ok(());
                }
                Variable::Whole(tensor) => visit(&item.name, tensor),
            }
        }
        self.all_done(Operation::SummonFull, so_far.map(|()| [])).map(drop)
    }

    /// In the order of a file.
    fn variables(&self) -> Vec<(Item, Variable<'_>)> {
        let named = self.params.iter().map(|param| (&param.name, param));
        let named = named.chain(self.aliases.iter().map(|(name, number)| (name, &self.params[*number])));
        let cut = named.map(|(name, param)| (item(name, param), Variable::Cut(param)));
        let whole = self.whole.iter().map(|(name, tensor)| (Item::of(name.clone(), tensor), Variable::Whole(tensor)));
        let mut all: Vec<_> = cut.chain(whole).collect();
        sort(&mut all, |(item, _)| item);
        all
    }

    /// Whether a file says the same under all names of one parameter.
    fn check_ties(&self, path: &Path, reader: &mut Reader) -> Result<()> {
        for (name, number) in &self.aliases {
            let param = &self.params[*number];
            let [first, second] = [&param.name, name].map(|name| read(reader, &item(name, param)));
            if !first?.allclose(&second?, 0.0, 0.0, true) {
                let difference =
                    format!("its `{}` and `{name}` differ, and are one parameter in the model", param.name);
                return Err(differs(path, difference));
            }
        }
        Ok(())
    }

    /// One parameter from all ranks' pieces, after a record of all of them.
    fn whole_of(&self, param: &Param, operation: Operation) -> std::result::Result<Tensor, DistError> {
        let whole = param.room(param.kind, Device::Cpu, &Spare::default());
        if let Some(group) = self.dist.group() {
            let gathered = group.gather_pieces(std::slice::from_ref(&whole));
            gathered.and_then(Works::wait).map_err(|error| self.dist.lost(operation, None, error))?;
        }
        Ok(whole.narrow(0, 0, param.numel).view(&param.shape[..]))
    }
}

/// A parameter as it is in a file.
fn item(name: &str, param: &Param) -> Item {
    Item { name: name.to_owned(), kind: param.kind, shape: param.shape.clone() }
}

/// Whether a file has all that the model has.
fn check(path: &Path, reader: &Reader, variables: &[(Item, Variable<'_>)]) -> Result<()> {
    for (item, _) in variables {
        let found = reader.item(&item.name)?.shape;
        if found != item.shape {
            let difference = format!("its `{}` is of shape {found:?}, and the model's {:?}", item.name, item.shape);
            return Err(differs(path, difference));
        }
    }
    Ok(())
}

fn read(reader: &mut Reader, item: &Item) -> Result<Tensor> {
    let flat = reader.read(&item.name, 0, item.shape.iter().product())?;
    flat.f_to_kind(item.kind).and_then(|flat| flat.f_view(&item.shape[..])).map_err(torch("make a tensor"))
}
