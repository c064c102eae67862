//! The data plane's few log lines, in the form of the Python services' own. Never per request, never text of clients.

use std::{
    io::Write,
    sync::atomic::{AtomicU8, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::date::strftime;

static LEVEL: AtomicU8 = AtomicU8::new(20);

/// Shows lines from this level on: "debug", "info", "warning", "error".
pub fn set_level(level: &str) {
    let number = match level {
        "debug" => 10,
        "warning" => 30,
        "error" => 40,
        _ => 20,
    };
    LEVEL.store(number, Ordering::Relaxed);
}

/// Something a person should know.
pub fn info(message: &str) {
    write(20, "INFO", message);
}

/// Something a person should look at.
pub fn warn(message: &str) {
    write(30, "WARNING", message);
}

fn write(number: u8, level: &str, message: &str) {
    if number < LEVEL.load(Ordering::Relaxed) {
        return;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let stamp = strftime("%Y-%m-%dT%H:%M:%S", now.as_secs() as i64);
    let line = format!(
        "{stamp}.{:03}Z {level} headrace.router: {message}
",
        now.subsec_millis()
    );
    // Nothing can be done about a closed stderr.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
