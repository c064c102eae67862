//! Files that may change while the process serves: how often they are looked at, and how a change shows.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime},
};

/// How often files are looked at.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Tells one state of a file from another without reading it: which file it is, its length and its last change.
pub type Mark = Option<(u64, u64, SystemTime)>;

/// Of what the path leads to, through links: a mounted secret changes by its folder's link.
pub fn mark(path: &Path) -> Mark {
    use std::os::unix::fs::MetadataExt as _;
    let found = fs::metadata(path).ok()?;
    Some((found.ino(), found.len(), found.modified().ok()?))
}
