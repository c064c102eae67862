//! What can be seen of a request before anything is generated: a row of numbers, the same for every classifier.
//!
//! Cheap on purpose (a few microseconds): of a long text only its beginning and its end are looked at. Nothing of the text
//! can be had back from the numbers.

/// How many there are.
pub const COUNT: usize = 22;

/// Their names, in order: a classifier says which it was trained on.
pub const NAMES: [&str; COUNT] = [
    "prompt_length",
    "last_length",
    "messages",
    "max_tokens",
    "max_tokens_open",
    "code_marks",
    "digits",
    "operators",
    "questions",
    "asks_fact",
    "asks_reason",
    "asks_yes_no",
    "asks_creation",
    "asks_transformation",
    "constraints",
    "greeting",
    "other_scripts",
    "capitals",
    "word_length",
    "lines",
    "guided",
    "tools",
];

/// One request's, in the order of [`NAMES`].
pub type Features = [f32; COUNT];

/// Bytes looked at, at a text's beginning and at its end.
const LOOKED_AT: usize = 1024;

/// What a request says beside its text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts {
    /// Bytes of everything that is said.
    pub bytes: usize,
    /// Messages; 1 for a plain prompt.
    pub messages: usize,
    /// The longest answer that is asked for.
    pub max_tokens: Option<u32>,
    /// The answer must have a form.
    pub guided: bool,
    /// Tools may be called.
    pub tools: bool,
}

/// Of the last thing that was said by the one who asks, and the facts beside it.
#[must_use]
pub fn of(last: &str, facts: &Facts) -> Features {
    let mut seen = Seen::default();
    let (head, tail) = ends(last);
    seen.look(head, true);
    seen.look(tail, false);
    let bytes = seen.bytes.max(1) as f32;
    let words = seen.words.max(1) as f32;
    let flag = |on: bool| if on { 1.0 } else { 0.0 };
    let log = |count: usize| (1.0 + count as f32).ln();
    [
        log(facts.bytes / 4),
        log(last.len() / 4),
        log(facts.messages),
        log(facts.max_tokens.unwrap_or(1024) as usize),
        flag(facts.max_tokens.is_none()),
        (seen.code as f32 / bytes * 20.0).min(2.0),
        (seen.digits as f32 / bytes * 10.0).min(2.0),
        (seen.operators as f32 / bytes * 20.0).min(2.0),
        log(seen.questions),
        flag(seen.fact),
        log(seen.reason),
        flag(seen.yes_no),
        log(seen.creation),
        log(seen.transformation),
        log(seen.constraints),
        flag(seen.greeting),
        seen.others as f32 / bytes,
        seen.capitals as f32 / bytes * 5.0,
        (seen.letters as f32 / words / 5.0).min(3.0),
        log(seen.lines),
        flag(facts.guided),
        flag(facts.tools),
    ]
}

/// A text's beginning and end, cut between characters; short ones are all beginning.
fn ends(text: &str) -> (&str, &str) {
    if text.len() <= 2 * LOOKED_AT {
        return (text, "");
    }
    let (mut head, mut tail) = (LOOKED_AT, text.len() - LOOKED_AT);
    while !text.is_char_boundary(head) {
        head -= 1;
    }
    while !text.is_char_boundary(tail) {
        tail += 1;
    }
    (&text[..head], &text[tail..])
}

#[derive(Default)]
struct Seen {
    bytes: usize,
    words: usize,
    letters: usize,
    capitals: usize,
    digits: usize,
    operators: usize,
    code: usize,
    others: usize,
    lines: usize,
    questions: usize,
    reason: usize,
    creation: usize,
    transformation: usize,
    constraints: usize,
    fact: bool,
    yes_no: bool,
    greeting: bool,
}

/// Longer words are none of ours.
const LONGEST_WORD: usize = 12;

impl Seen {
    fn look(&mut self, text: &str, is_beginning: bool) {
        self.bytes += text.len();
        let mut word = [0_u8; LONGEST_WORD];
        let (mut length, mut first) = (0, is_beginning);
        for &byte in text.as_bytes().iter().chain(b" ") {
            if byte.is_ascii_alphabetic() || byte == b'\'' {
                if let Some(place) = word.get_mut(length) {
                    *place = byte.to_ascii_lowercase();
                }
                length += 1;
                self.letters += 1;
                self.capitals += usize::from(byte.is_ascii_uppercase());
                continue;
            }
            if length > 0 {
                self.words += 1;
                if let Some(word) = word.get(..length) {
                    self.word(word, first);
                }
                (length, first) = (0, false);
            }
            match byte {
                b'0'..=b'9' => self.digits += 1,
                b'+' | b'*' | b'/' | b'=' | b'^' | b'%' | b'<' | b'>' => self.operators += 1,
                b'{' | b'}' | b'(' | b')' | b'[' | b']' | b';' | b'`' | b'_' | b'\\' | b'#' => self.code += 1,
                b'?' => self.questions += 1,
                b'\n' => self.lines += 1,
                0x80.. => self.others += 1,
                _ => {}
            }
        }
    }

    fn word(&mut self, word: &[u8], is_first: bool) {
        match word {
            b"what" | b"who" | b"when" | b"where" | b"which" | b"whose" => self.fact = true,
            b"why" | b"how" | b"explain" | b"prove" | b"derive" | b"compare" | b"analyze" | b"analyse" | b"because"
            | b"reason" | b"step" | b"steps" | b"solve" | b"calculate" | b"compute" | b"evaluate" | b"design" => {
                self.reason += 1;
            }
            b"is" | b"are" | b"do" | b"does" | b"can" | b"did" | b"was" | b"were" | b"has" | b"have" if is_first => {
                self.yes_no = true;
            }
            b"write" | b"story" | b"poem" | b"essay" | b"imagine" | b"invent" | b"compose" | b"letter" | b"email"
            | b"create" | b"generate" => self.creation += 1,
            b"translate" | b"summarize" | b"summarise" | b"rewrite" | b"list" | b"extract" | b"classify"
            | b"convert" | b"correct" | b"repeat" | b"sort" => self.transformation += 1,
            b"must" | b"exactly" | b"only" | b"least" | b"most" | b"without" | b"never" | b"always" | b"each"
            | b"every" => self.constraints += 1,
            b"hello" | b"hi" | b"hey" | b"thanks" | b"thank" if is_first => self.greeting = true,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str, facts: &Facts, name: &str) -> f32 {
        let at = NAMES.iter().position(|known| *known == name);
        at.map_or(f32::NAN, |at| of(text, facts)[at])
    }

    #[test]
    fn what_is_asked_shows() {
        let facts = Facts::default();
        assert_eq!(named("What is the capital of France?", &facts, "asks_fact"), 1.0);
        assert_eq!(named("Is it so?", &facts, "asks_yes_no"), 1.0);
        assert_eq!(named("It is so.", &facts, "asks_yes_no"), 0.0);
        assert_eq!(named("hello there", &facts, "greeting"), 1.0);
        assert!(named("Explain step by step how it works", &facts, "asks_reason") > 1.0);
        assert!(named("fn main() { let x = y[0]; }", &facts, "code_marks") > 1.0);
        assert!(named("12 * (3 + 4) = ?", &facts, "operators") > 0.5);
        assert!(named("größer", &facts, "other_scripts") > 0.0);
    }

    #[test]
    fn facts_beside_the_text_show() {
        let facts = Facts {
            bytes: 400,
            messages: 3,
            max_tokens: None,
            guided: true,
            tools: false,
        };
        assert_eq!(named("x", &facts, "max_tokens_open"), 1.0);
        assert_eq!(named("x", &facts, "guided"), 1.0);
        assert!((named("x", &facts, "prompt_length") - 101_f32.ln()).abs() < 1e-6);
        let asked = Facts {
            max_tokens: Some(15),
            ..facts
        };
        assert!((named("x", &asked, "max_tokens") - 16_f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn long_texts_are_cut_between_characters_and_all_numbers_are_finite() {
        for text in ["", "é".repeat(5000).as_str(), "a".repeat(100_000).as_str(), "\u{1F600}"] {
            let row = of(text, &Facts::default());
            assert!(row.iter().all(|value| value.is_finite()), "{row:?}");
        }
    }
}
