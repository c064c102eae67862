//! Dates of the Gregorian calendar in UTC: for templates that tell the day, and for log lines. No clock of its own.

/// Python's `strftime` of a Unix time in UTC, for what templates ask for. An unknown directive stays as it is.
pub fn strftime(format: &str, now_s: i64) -> String {
    const DAYS: [&str; 7] = [
        "Monday",
        "Tuesday",
        "Wednesday",
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
    ];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (days, seconds) = (now_s.div_euclid(86_400), now_s.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    // 1 January 1970 was a Thursday.
    let weekday = DAYS[(days + 3).rem_euclid(7) as usize];
    let month_name = MONTHS[(month - 1).rem_euclid(12) as usize];
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let bare = chars.next_if_eq(&'-').is_some();
        let padded = |number: i64| {
            if bare {
                number.to_string()
            } else {
                format!("{number:02}")
            }
        };
        match chars.next() {
            Some('Y') => out.push_str(&format!("{year:04}")),
            Some('y') => out.push_str(&padded(year.rem_euclid(100))),
            Some('m') => out.push_str(&padded(month)),
            Some('d') => out.push_str(&padded(day)),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('H') => out.push_str(&padded(hour)),
            Some('I') => out.push_str(&padded(hour12)),
            Some('M') => out.push_str(&padded(minute)),
            Some('S') => out.push_str(&padded(second)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('j') => out.push_str(&format!("{:03}", days - days_before_year(year) + 1)),
            Some('F') => out.push_str(&format!("{year:04}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a day counted from 1 January 1970 (Hinnant's `civil_from_days`).
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

fn days_before_year(year: i64) -> i64 {
    let before = year - 1;
    365 * (year - 1970) + (before / 4 - before / 100 + before / 400) - (1969 / 4 - 1969 / 100 + 1969 / 400)
}
