//! Checks that the C++ shim defines nothing of Gloo's.
//!
//! Gloo is inside `LibTorch`, whose wheel has none of its headers: `replay-runtime/cpp/gloo` declares what the header of
//! `ProcessGroupGloo` mentions. If the shim defined anything of these classes, it would be by those declarations and not by
//! the real ones, and the linker could take ours for theirs.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::cargo;
use crate::environment::Environment;

/// Builds what the tests need, and reads the shim's symbols.
pub(crate) fn run(env: &Environment) -> Result<()> {
    // The tests' own selection of packages, so that nothing is compiled twice.
    let mut cargo = cargo::command(env);
    cargo.args(["test", "--locked", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"]);
    let messages = output(cargo.stderr(std::process::Stdio::inherit()))?;
    let libraries = libraries(&messages);
    if libraries.is_empty() {
        bail!("cargo has not said where the build script of replay-runtime puts its library");
    }
    let Some(nm) = env.program("nm") else {
        println!("there is no `nm` (binutils has it): skipped");
        return Ok(());
    };
    for library in &libraries {
        check(&nm, library)?;
    }
    Ok(())
}

fn check(nm: &Path, library: &Path) -> Result<()> {
    let listing = output(Command::new(nm).arg("-C").arg(library))?;
    if !listing.contains("replay_group_new") {
        bail!("{} does not have the function `replay_group_new`: is it the shim?", library.display());
    }
    let foreign = foreign(&listing);
    if !foreign.is_empty() {
        bail!("{} defines what is Gloo's:\n{}", library.display(), foreign.join("\n"));
    }
    println!("nothing of Gloo's is defined in {}", library.display());
    Ok(())
}

fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("`{program}` cannot be started"))?;
    if !output.status.success() {
        bail!("`{program}` failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where the shim is, by cargo's messages, of which each is a line of JSON.
fn libraries(messages: &str) -> Vec<PathBuf> {
    let field = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
        rest.split_once('"').map(|(value, _)| value.to_owned())
    };
    let mut found: Vec<_> = messages
        .lines()
        .filter(|line| field(line, "reason").as_deref() == Some("build-script-executed"))
        .filter(|line| field(line, "package_id").is_some_and(|id| id.contains("replay-runtime")))
        .filter_map(|line| field(line, "out_dir"))
        .map(|folder| Path::new(&folder).join("libreplay_shim.a"))
        .collect();
    found.sort();
    found.dedup();
    found
}

/// The lines of `nm -C` that define what is Gloo's or `ProcessGroupGloo`'s, whatever kind of symbol.
///
/// Helpers of pointers to them are the compiler's, wherever such a pointer is used: templates of c10, the same everywhere.
fn foreign(listing: &str) -> Vec<&str> {
    let is_foreign = |line: &&str| {
        let Some((kind, name)) = definition(line) else { return false };
        let helper = matches!(kind, 'W' | 'V') && name.starts_with("c10::intrusive_ptr<c10d::ProcessGroupGloo");
        !helper && (name.contains("c10d::ProcessGroupGloo") || mentions_gloo(name))
    };
    listing.lines().filter(is_foreign).collect()
}

/// The kind and the name of a symbol that the line says is defined: those that are not have no address.
fn definition(line: &str) -> Option<(char, &str)> {
    let (address, rest) = line.split_once(' ')?;
    if address.is_empty() || !address.chars().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let (kind, name) = rest.split_once(' ')?;
    Some((kind.chars().next()?, name))
}

/// `gloo::` as a namespace, and not as the end of another one's name.
fn mentions_gloo(name: &str) -> bool {
    let begins = |at: usize| !name[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_');
    name.match_indices("gloo::").any(|(at, _)| begins(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_shim_needs_is_not_what_it_defines() {
        let listing = "\n123-group.o:\n\
            0000000000000040 T replay_group_new\n\
            \x20                U c10d::ProcessGroupGloo::Options::create_default(std::chrono::duration<long>)\n\
            \x20                U c10d::ProcessGroupGloo::ProcessGroupGloo(int)\n\
            \x20                w gloo::Context::setTimeout()\n\
            0000000000000000 W c10::intrusive_ptr<c10d::ProcessGroupGloo, c10::detail::target<c10d::ProcessGroupGloo> >::reset_not_null_(c10d::ProcessGroupGloo*)\n\
            0000000000000000 V c10::intrusive_ptr<c10d::ProcessGroupGloo::Options>::guard\n\
            0000000000000000 W std::vector<igloo::House>::size()\n\
            0000000000000000 T replay::my_gloo::f()\n";
        assert_eq!(foreign(listing), [""; 0]);
    }

    #[test]
    fn every_kind_of_definition_is_found() {
        for line in [
            "0000000000000000 T gloo::Context::setTimeout(std::chrono::duration<long>)",
            "0000000000000000 W gloo::rendezvous::Store::~Store()",
            "0000000000000000 V vtable for gloo::rendezvous::Store",
            "0000000000000000 V typeinfo name for gloo::transport::Device",
            "0000000000000000 W std::_Sp_counted_ptr<gloo::Context*>::_M_dispose()",
            "0000000000000010 t c10d::ProcessGroupGloo::setTimeout(int)",
            "0000000000000000 W c10d::ProcessGroupGloo::Options::~Options()",
            "0000000000000000 V vtable for c10d::ProcessGroupGloo",
            "0000000000000000 u c10d::ProcessGroupGloo::count",
            "0000000000000000 T c10::intrusive_ptr<c10d::ProcessGroupGloo>::reset()",
        ] {
            assert_eq!(foreign(&format!("a.o:\n{line}\n")), [line]);
        }
    }

    #[test]
    fn a_compiled_definition_is_found() {
        let env = Environment::from_process().unwrap();
        let nm = env.program("nm").expect("binutils, or what a C++ compiler has instead of it");
        let folder = tempfile::tempdir().unwrap();
        let compile = |name: &str, source: &str| {
            let [file, object] = ["cpp", "o"].map(|end| folder.path().join(name).with_extension(end));
            std::fs::write(&file, source).unwrap();
            output(Command::new("c++").arg("-c").arg(&file).arg("-o").arg(&object)).unwrap();
            object
        };
        let ours = "extern \"C\" void replay_group_new() {}\nnamespace gloo { struct Context { void close(); }; }\n";
        let clean = compile("clean", &format!("{ours}extern \"C\" void g(gloo::Context* c) {{ c->close(); }}\n"));
        check(&nm, &clean).unwrap();
        let defines = compile("defines", &format!("{ours}void gloo::Context::close() {{}}\n"));
        let error = check(&nm, &defines).unwrap_err().to_string();
        assert!(error.contains("defines what is Gloo's") && error.contains("gloo::Context::close()"), "{error}");
        let other = compile("other", "void f() {}\n");
        assert!(check(&nm, &other).unwrap_err().to_string().contains("is it the shim?"));
    }

    #[test]
    fn the_library_is_where_cargo_says() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","package_id":"path+file:///w/replay-runtime#0.1.0","out_dir":"/no"}"#,
            "\n",
            r#"{"reason":"build-script-executed","package_id":"registry+https://x#torch-sys@0.26.0","out_dir":"/t"}"#,
            "\n",
            r#"{"reason":"build-script-executed","package_id":"path+file:///w/replay-runtime#0.1.0","env":[],"out_dir":"/target/a/out"}"#,
            "\nnot JSON\n",
        );
        assert_eq!(libraries(messages), [Path::new("/target/a/out/libreplay_shim.a")]);
    }
}
