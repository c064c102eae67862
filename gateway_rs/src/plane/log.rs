//! The data plane's few log lines, in the form of the Python services' own. Never per request, never text of clients.

use std::{
    io::Write,
    sync::atomic::{AtomicU8, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

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
    let line = format!(
        "{} {level} headrace.router: {message}\n",
        stamp(now.as_secs(), now.subsec_millis())
    );
    // Nothing can be done about a closed stderr.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// UTC as `YYYY-MM-DDThh:mm:ss.mmmZ` (days to date after Howard Hinnant's `civil_from_days`).
fn stamp(seconds: u64, millis: u32) -> String {
    let (days, rest) = ((seconds / 86_400) as i64, seconds % 86_400);
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{millis:03}Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_stamp_is_utc() {
        assert_eq!(super::stamp(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(super::stamp(951_782_400, 7), "2000-02-29T00:00:00.007Z");
        assert_eq!(super::stamp(1_796_000_000, 0), "2026-11-30T00:53:20.000Z");
    }
}
