//! Pre-tokenisation: where the pieces of a text end.
//!
//! One scanner a family of patterns, written by hand from the regular expression above it: one pass, no backtracking
//! beyond one remembered position, linear for any text. A scanner decides from the piece's start on, never looking at
//! what came before; the end of the text it is given counts as an end (for `\s+(?!\S)`), so a caller cuts at added
//! tokens first.

use super::classes::{
    ClassSet, Classes, CLASSES, END, LETTER, LOWER, MARK, NEWLINE, NUMBER, OTHER, SPACE, SYMBOL, UNCASED, UPPER, WHITE,
};

/// A family of pre-tokenisation patterns, recognised in a `tokenizer.json` by the exact expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// GPT-2's; with `digits`, each number is cut out before (SmolLM2).
    Gpt2 { digits: bool },
    /// cl100k, Llama 3 (numbers by `digits` = 3), Qwen 2 and 3 (`digits` = 1).
    Cl100k { digits: usize },
    /// o200k, Llama 4 (`digits` = 3), and Tekken (`digits` = 1, no `contractions`).
    O200k { digits: usize, contractions: bool },
}

/// The expressions as the files have them.
#[rustfmt::skip]
pub(crate) mod expressions {
    pub(crate) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    pub(crate) const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    pub(crate) const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    pub(crate) const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    pub(crate) const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
}

impl Pattern {
    /// The pattern of a `Split` step, if it is one of ours.
    pub(crate) fn of_expression(expression: &str) -> Option<Self> {
        match expression {
            expressions::GPT2 => Some(Self::Gpt2 { digits: false }),
            expressions::CL100K => Some(Self::Cl100k { digits: 3 }),
            expressions::QWEN2 => Some(Self::Cl100k { digits: 1 }),
            expressions::O200K => Some(Self::O200k {
                digits: 3,
                contractions: true,
            }),
            expressions::TEKKEN => Some(Self::O200k {
                digits: 1,
                contractions: false,
            }),
            _ => None,
        }
    }

    /// The family's name, for plans and reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gpt2 { digits: false } => "gpt2",
            Self::Gpt2 { digits: true } => "gpt2-digits",
            Self::Cl100k { digits: 3 } => "cl100k",
            Self::Cl100k { .. } => "qwen2",
            Self::O200k { contractions: true, .. } => "o200k",
            Self::O200k { .. } => "tekken",
        }
    }

    /// Calls `piece(start, end)` for each piece of `text`, in order, until it returns false.
    #[inline]
    pub(crate) fn for_each_piece(self, text: &str, piece: impl FnMut(usize, usize) -> bool) {
        let scan = Scan::<false>::new(text);
        match self {
            Self::Gpt2 { digits: false } => walk(text.len(), |at| scan.gpt2(at), piece),
            Self::Gpt2 { digits: true } => {
                let scan = Scan::<true>::new(text);
                walk(text.len(), |at| scan.gpt2(at), piece);
            }
            Self::Cl100k { digits } => walk(text.len(), |at| scan.cl100k(at, digits), piece),
            Self::O200k { digits, contractions } => {
                walk(text.len(), |at| scan.o200k(at, digits, contractions), piece);
            }
        }
    }
}

#[inline(always)]
fn walk(len: usize, next: impl Fn(usize) -> usize, mut piece: impl FnMut(usize, usize) -> bool) {
    let mut start = 0;
    while start < len {
        let end = next(start);
        if !piece(start, end) {
            return;
        }
        start = end;
    }
}

/// A text under a scanner. With `DIGITS`, numbers were cut out of it (the `Digits` step): each is a piece by itself and
/// the end of the text before it.
struct Scan<'a, const DIGITS: bool> {
    bytes: &'a [u8],
    classes: &'static Classes,
}

/// Upper, title and uncased letters and marks: the first half of an o200k word.
const HEAD: ClassSet = UPPER | UNCASED | MARK;
/// Lower and uncased letters and marks: its second half.
const TAIL: ClassSet = LOWER | UNCASED | MARK;

impl<'a, const DIGITS: bool> Scan<'a, DIGITS> {
    fn new(text: &'a str) -> Self {
        Self {
            bytes: text.as_bytes(),
            classes: &CLASSES,
        }
    }

    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    #[inline(always)]
    fn gpt2(&self, start: usize) -> usize {
        let (class, len) = self.at(start);
        let (lead, class, len) = if class == SPACE {
            let (next, next_len) = self.at(start + 1);
            (start + 1, next, next_len)
        } else {
            (start, class, len)
        };
        match class {
            _ if class & LETTER != 0 => self.letters(lead + len),
            NUMBER if !DIGITS => self.run(lead + len, NUMBER),
            NUMBER if lead == start => lead + len,
            _ if class & SYMBOL != 0 => {
                if lead == start && self.bytes[start] == b'\'' {
                    if let Some(end) = self.contraction(start, false) {
                        return end;
                    }
                }
                self.run(lead + len, SYMBOL)
            }
            _ => self.white(start),
        }
    }

    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
    #[inline(always)]
    fn cl100k(&self, start: usize, digits: usize) -> usize {
        let (class, len) = self.at(start);
        if class & LETTER != 0 {
            return self.letters(start + len);
        }
        if class == NUMBER {
            return self.numbers(start + len, digits);
        }
        if class & SYMBOL != 0 && self.bytes[start] == b'\'' {
            if let Some(end) = self.contraction(start, true) {
                return end;
            }
        }
        let (next, next_len) = self.at(start + len);
        if class != NEWLINE && next & LETTER != 0 {
            return self.letters(start + len + next_len);
        }
        if class & SYMBOL != 0 || (class == SPACE && next & SYMBOL != 0) {
            return self.run(self.run(start + len, SYMBOL), NEWLINE);
        }
        self.white_with_newlines(start)
    }

    /// `W C?|...` where a word W is `[^\r\n\p{L}\p{N}]?HEAD*TAIL+`, else `[^\r\n\p{L}\p{N}]?HEAD+TAIL*`, and C a
    /// contraction in any case; then `\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`.
    #[inline(always)]
    fn o200k(&self, start: usize, digits: usize, contractions: bool) -> usize {
        let (class, len) = self.at(start);
        if class == NUMBER {
            return self.numbers(start + len, digits);
        }
        if let Some(end) = self.cased_word(start, class, len) {
            if contractions && self.bytes.get(end) == Some(&b'\'') {
                return self.contraction(end, true).unwrap_or(end);
            }
            return end;
        }
        if class & SYMBOL != 0 || (class == SPACE && self.at(start + len).0 & SYMBOL != 0) {
            let mut end = self.run(start + len, SYMBOL);
            while matches!(self.bytes.get(end), Some(b'\r' | b'\n' | b'/')) {
                end += 1;
            }
            return end;
        }
        self.white_with_newlines(start)
    }

    /// The end of an o200k word at `start`, whose first character has `class` and `len`.
    #[inline(always)]
    fn cased_word(&self, start: usize, class: ClassSet, len: usize) -> Option<usize> {
        // The expression's order: both forms of the first alternative (with a lead, without) before those of the second.
        let may_lead = class & (LETTER | NUMBER | NEWLINE) == 0;
        let may_begin = class & (HEAD | TAIL) != 0;
        let led = if may_lead { self.cased(start + len) } else { Cased::No };
        let bare = if may_begin && !led.has_tail() {
            self.cased(start)
        } else {
            Cased::No
        };
        match (led, bare) {
            (Cased::WithTail(end), _) | (_, Cased::WithTail(end)) => Some(end),
            (Cased::HeadOnly(end), _) | (_, Cased::HeadOnly(end)) => Some(end),
            (Cased::No, Cased::No) => None,
        }
    }

    /// `HEAD*TAIL+` at `start`, or else `HEAD+TAIL*`.
    #[inline(always)]
    fn cased(&self, start: usize) -> Cased {
        let mut head_end = start;
        let mut last_in_both = None;
        loop {
            let (class, len) = self.at(head_end);
            if class & HEAD == 0 {
                break;
            }
            head_end += len;
            if class & TAIL != 0 {
                last_in_both = Some(head_end);
            }
        }
        let tail_end = self.tail(head_end);
        if tail_end > head_end {
            return Cased::WithTail(tail_end);
        }
        // HEAD* gives back until TAIL+ finds something: the last character that is in both sets.
        match last_in_both {
            Some(end) => Cased::WithTail(end),
            None if head_end > start => Cased::HeadOnly(head_end),
            None => Cased::No,
        }
    }

    /// The end of the numbers of which the first ends at `end`, `limit` at most altogether.
    #[inline(always)]
    fn numbers(&self, mut end: usize, limit: usize) -> usize {
        for _ in 1..limit {
            let (class, len) = self.at(end);
            if class != NUMBER {
                break;
            }
            end += len;
        }
        end
    }

    /// `'s|'t|'m|'d|'re|'ve|'ll` at the apostrophe `start`. In any case U+017F, the long s, folds to s.
    #[inline]
    fn contraction(&self, start: usize, any_case: bool) -> Option<usize> {
        let fold = if any_case { 0x20 } else { 0 };
        let first = self.bytes.get(start + 1)? | fold;
        match first {
            b's' | b't' | b'm' | b'd' => return Some(start + 2),
            b'r' | b'v' | b'l' => {}
            0xE5 if any_case => {
                // U+017F is C5 BF; C5 with the case bit set is E5.
                let long_s = self.bytes.get(start + 1..start + 3) == Some(&[0xC5, 0xBF]);
                return long_s.then_some(start + 3);
            }
            _ => return None,
        }
        let second = self.bytes.get(start + 2)? | fold;
        matches!((first, second), (b'r' | b'v', b'e') | (b'l', b'l')).then_some(start + 3)
    }

    /// `\s+(?!\S)|\s+`: a run of white space without its last character, unless the text ends there or it is the only
    /// one.
    fn white(&self, start: usize) -> usize {
        self.white_run(start).end
    }

    /// `\s*[\r\n]+|\s+(?!\S)|\s+`: up to the last line break of the run if there is one.
    fn white_with_newlines(&self, start: usize) -> usize {
        let run = self.white_run(start);
        run.after_newline.unwrap_or(run.end)
    }

    fn white_run(&self, start: usize) -> WhiteRun {
        let (mut end, mut last, mut after_newline) = (start, start, None);
        loop {
            let (class, len) = self.at(end);
            if class & WHITE == 0 {
                let text_ends = class == END || (DIGITS && class == NUMBER);
                let end = if text_ends || last == start { end } else { last };
                return WhiteRun { end, after_newline };
            }
            last = end;
            end += len;
            if class == NEWLINE {
                after_newline = Some(end);
            }
        }
    }

    /// The end of the characters of `set` from `at` on.
    #[inline(always)]
    fn run(&self, mut at: usize, set: ClassSet) -> usize {
        loop {
            let (class, len) = self.at(at);
            if class & set == 0 {
                return at;
            }
            at += len;
        }
    }

    /// The end of the letters from `at` on; eight ASCII letters at a time.
    #[inline(always)]
    fn letters(&self, mut at: usize) -> usize {
        loop {
            at += ascii_letters_from(self.bytes, at);
            let (class, len) = self.at(at);
            if class & LETTER == 0 {
                return at;
            }
            at += len;
        }
    }

    /// The end of the characters of TAIL from `at` on; eight ASCII letters at a time.
    #[inline(always)]
    fn tail(&self, mut at: usize) -> usize {
        loop {
            while let Some(word) = self.word(at) {
                let letters = leading(ascii_in_range(word, b'a', b'z'));
                at += letters;
                if letters < 8 {
                    break;
                }
            }
            let (class, len) = self.at(at);
            if class & TAIL == 0 {
                return at;
            }
            at += len;
        }
    }

    /// Eight bytes from `at` on, if there are as many.
    #[inline(always)]
    fn word(&self, at: usize) -> Option<u64> {
        self.bytes
            .get(at..)
            .and_then(|rest| rest.first_chunk())
            .map(|chunk| u64::from_le_bytes(*chunk))
    }

    /// The class and length of the character at `at`; [`END`] and 0 at the end.
    #[inline(always)]
    fn at(&self, at: usize) -> (ClassSet, usize) {
        #[cfg(test)]
        super::work::count(1);
        match self.bytes.get(at) {
            None => (END, 0),
            Some(byte) if *byte < 0x80 => (self.classes.of_ascii(*byte), 1),
            Some(byte) => self.wide(at, *byte),
        }
    }

    /// [`Scan::at`] for a character of several bytes that begins with `lead`.
    fn wide(&self, at: usize, lead: u8) -> (ClassSet, usize) {
        let (codepoint, len) = codepoint(self.bytes, at, lead);
        let class = self.classes.of(codepoint);
        // The reference's `Digits` step asks Rust's standard library, which may know numbers that its regex engine
        // doesn't yet.
        if DIGITS && class == OTHER && char::from_u32(codepoint).is_some_and(char::is_numeric) {
            return (NUMBER, len);
        }
        (class, len)
    }
}

/// The codepoint and length of the character of several bytes at `at`, whose first byte is `lead`. The bytes are UTF-8.
#[inline(always)]
pub(crate) fn codepoint(bytes: &[u8], at: usize, lead: u8) -> (u32, usize) {
    let continuation = |n: usize| bytes.get(at + n).map_or(0, |byte| u32::from(byte & 0x3F));
    let lead = u32::from(lead);
    match lead {
        0..0xE0 => ((lead & 0x1F) << 6 | continuation(1), 2),
        0xE0..0xF0 => ((lead & 0x0F) << 12 | continuation(1) << 6 | continuation(2), 3),
        _ => (
            (lead & 0x07) << 18 | continuation(1) << 12 | continuation(2) << 6 | continuation(3),
            4,
        ),
    }
}

/// How many ASCII letters there are from `at` on, counted eight at a time; a remainder of fewer than eight bytes is left.
#[inline(always)]
pub(crate) fn ascii_letters_from(bytes: &[u8], mut at: usize) -> usize {
    let start = at;
    while let Some(chunk) = bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        let letters = leading(ascii_letters(u64::from_le_bytes(*chunk)));
        at += letters;
        if letters < 8 {
            break;
        }
    }
    at - start
}

/// What `cased` found.
#[derive(Clone, Copy)]
enum Cased {
    /// `HEAD*TAIL+` up to here.
    WithTail(usize),
    /// `HEAD+` up to here.
    HeadOnly(usize),
    No,
}

impl Cased {
    fn has_tail(self) -> bool {
        matches!(self, Self::WithTail(_))
    }
}

struct WhiteRun {
    /// Where `\s+(?!\S)|\s+` ends.
    end: usize,
    /// Where `\s*[\r\n]+` ends.
    after_newline: Option<usize>,
}

const HIGH_BITS: u64 = 0x8080_8080_8080_8080;

/// The high bit of each byte that is an ASCII letter.
#[inline(always)]
fn ascii_letters(word: u64) -> u64 {
    // Setting the case bit makes no letter of another byte: 0x41..=0x5A alone map to 0x61..=0x7A.
    ascii_in_range(word | 0x2020_2020_2020_2020, b'a', b'z')
}

/// The high bit of each byte within `first..=last`, both ASCII.
#[inline(always)]
fn ascii_in_range(word: u64, first: u8, last: u8) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    // On seven bits a byte, so that no sum carries into the next byte.
    let low = word & !HIGH_BITS;
    let not_below = low + ONES * u64::from(0x80 - first);
    let above = low + ONES * u64::from(0x7F - last);
    not_below & !above & !word & HIGH_BITS
}

/// How many bytes from the first on are marked.
#[inline(always)]
fn leading(marks: u64) -> usize {
    ((!marks & HIGH_BITS).trailing_zeros() / 8) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPT2: Pattern = Pattern::Gpt2 { digits: false };
    const GPT2_DIGITS: Pattern = Pattern::Gpt2 { digits: true };
    const CL100K: Pattern = Pattern::Cl100k { digits: 3 };
    const QWEN2: Pattern = Pattern::Cl100k { digits: 1 };
    const O200K: Pattern = Pattern::O200k {
        digits: 3,
        contractions: true,
    };

    fn pieces(pattern: Pattern, text: &str) -> Vec<&str> {
        let mut pieces = Vec::new();
        pattern.for_each_piece(text, |start, end| {
            pieces.push(&text[start..end]);
            true
        });
        assert_eq!(pieces.concat(), text);
        pieces
    }

    #[test]
    fn gpt2() {
        for (text, expected) in [
            (
                "don't DON'T 'tis ''s",
                &["don", "'t", " DON", "'", "T", " '", "tis", " ''", "s"][..],
            ),
            ("a  b", &["a", " ", " b"]),
            ("a   ", &["a", "   "]),
            ("a \n b", &["a", " \n", " b"]),
            ("\r\nx", &["\r", "\n", "x"]),
            (" \u{a0}x", &[" ", "\u{a0}", "x"]),
            ("\u{3000}x", &["\u{3000}", "x"]),
            ("\u{85}'s", &["\u{85}", "'s"]),
            ("\u{200b}x", &["\u{200b}", "x"]),
            ("\u{180e}x\x1cx", &["\u{180e}", "x", "\x1c", "x"]),
            ("a  12", &["a", " ", " 12"]),
        ] {
            assert_eq!(pieces(GPT2, text), expected, "{text:?}");
        }
    }

    #[test]
    fn gpt2_with_digits_cut_out() {
        for (text, expected) in [
            ("a  12", &["a", "  ", "1", "2"][..]),
            (" ½", &[" ", "½"]),
            ("٣٤Ⅷ²", &["٣", "٤", "Ⅷ", "²"]),
            ("a1's", &["a", "1", "'s"]),
            ("a  b", &["a", " ", " b"]),
        ] {
            assert_eq!(pieces(GPT2_DIGITS, text), expected, "{text:?}");
        }
    }

    #[test]
    fn cl100k() {
        for (text, expected) in [
            ("'LLx 'Sx I'D", &["'LL", "x", " '", "Sx", " I", "'D"][..]),
            ("'ſ", &["'ſ"]),
            ("1234567", &["123", "456", "7"]),
            ("٣٣٣٣", &["٣٣٣", "٣"]),
            ("Ⅷ123", &["Ⅷ12", "3"]),
            (".\n\nx", &[".\n\n", "x"]),
            ("a \n\n b", &["a", " \n\n", " b"]),
            ("\n \n", &["\n \n"]),
            (" \r\n\t", &[" \r\n", "\t"]),
            ("\tfoo", &["\tfoo"]),
            ("\u{a0}foo_foo", &["\u{a0}foo", "_foo"]),
            ("\nfoo", &["\n", "foo"]),
            ("\t%s", &["\t", "%s"]),
        ] {
            assert_eq!(pieces(CL100K, text), expected, "{text:?}");
        }
        assert_eq!(pieces(QWEN2, "x123"), ["x", "1", "2", "3"]);
    }

    #[test]
    fn o200k() {
        for (text, expected) in [
            ("XMLHttpRequest", &["XMLHttp", "Request"][..]),
            ("éÉ", &["é", "É"]),
            ("ǅabc", &["ǅabc"]),
            ("ʰA", &["ʰ", "A"]),
            ("中A", &["中", "A"]),
            ("D'ſ'Se", &["D'ſ", "'Se"]),
            ("IT'S'lle", &["IT'S", "'lle"]),
            ("!\n/foo", &["!\n/", "foo"]),
            ("//\n", &["//\n"]),
            ("\u{301}a", &["\u{301}a"]),
            ("\u{301}A", &["\u{301}", "A"]),
            ("_A中B", &["_A中", "B"]),
            ("!\u{301}", &["!\u{301}"]),
            ("'লৈ", &["'লৈ"]),
            ("e\u{301}'S", &["e\u{301}'S"]),
            ("\n \n", &["\n \n"]),
            ("\t(i", &["\t", "(i"]),
        ] {
            assert_eq!(pieces(O200K, text), expected, "{text:?}");
        }
    }

    #[test]
    fn eight_letters_at_a_time_are_the_letters() {
        for byte in 0..=255u8 {
            let word = u64::from_le_bytes([byte; 8]);
            assert_eq!(
                leading(ascii_letters(word)) == 8,
                byte.is_ascii_alphabetic(),
                "{byte:#x}"
            );
            assert_eq!(
                leading(ascii_in_range(word, b'a', b'z')) == 8,
                byte.is_ascii_lowercase(),
                "{byte:#x}"
            );
        }
        assert_eq!(leading(ascii_letters(u64::from_le_bytes(*b"abc def\xff"))), 3);
    }

    #[test]
    fn scanning_is_linear_for_any_run() {
        for pattern in [GPT2, GPT2_DIGITS, CL100K, QWEN2, O200K] {
            for unit in super::super::work::RUNS {
                let steps = |repeats: usize| {
                    let text = unit.repeat(repeats);
                    super::super::work::counted(|| pattern.for_each_piece(&text, |_, _| true)) as f64
                        / text.len() as f64
                };
                let (short, long) = (steps(1_000), steps(16_000));
                assert!(
                    long <= short * 1.5 + 0.1,
                    "{pattern:?} on {unit:?}: {short} to {long} steps a byte"
                );
            }
        }
    }
}
