//! What the benchmark programs share: their command lines and the clock by which they understand each other.

use std::{
    collections::HashMap,
    error::Error,
    io::Write as _,
    str::FromStr,
    time::{SystemTime, UNIX_EPOCH},
};

/// Errors of a benchmark program are for people.
pub type Failure = Box<dyn Error + Send + Sync>;

/// `--key value` pairs, and nothing else.
pub struct Arguments(HashMap<String, String>);

impl Arguments {
    /// Those of this process.
    pub fn read() -> Result<Self, Failure> {
        let mut pairs = HashMap::new();
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let key = word
                .strip_prefix("--")
                .ok_or_else(|| format!("expected --key, got {word}"))?;
            let value = words.next().ok_or_else(|| format!("--{key} needs a value"))?;
            pairs.insert(key.to_owned(), value);
        }
        Ok(Self(pairs))
    }

    /// That key's value, or the default.
    pub fn take<T: FromStr>(&mut self, key: &str, default: T) -> Result<T, Failure> {
        match self.0.remove(key) {
            None => Ok(default),
            Some(text) => text
                .parse()
                .map_err(|_| format!("--{key}: cannot understand {text}").into()),
        }
    }

    /// Refuses what nobody took.
    pub fn finish(self) -> Result<(), Failure> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(key) => Err(format!("unknown option --{key}").into()),
        }
    }
}

/// Nanoseconds of the machine's clock: the same in every process on it, so that one may stamp what another has sent.
pub fn now_ns() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64)
}

/// One line to stdout, at once.
pub fn say(line: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}
