//! The load check: our own encoder and the reference must agree on a fixed set of texts before it serves a model.
//!
//! A bug in the encoder, an unforeseen setting in a file, a newer Unicode in a dependency: each shows here as a difference,
//! and the model is then encoded by the reference. A fifth of a second a model.

use super::fast::FastEncoder;
use super::pieces::TokenTable;
use super::reference::Reference;
use super::specials::Specials;

/// Short texts on which tokenizers are known to differ, and samples of code and scripts.
pub(crate) const TEXTS: &[&str] = &[
    "",
    "don't DON'T 'tis ''s I'll we've you're 's 't",
    "a  b",
    "a   ",
    "a \n b\r\nx \r\n\t y",
    " \u{a0}x\u{3000}y\u{85}'s\u{200b}x\u{180e}x\x1cx",
    "a  12 ½ ٣٤Ⅷ² 1234567 ٣٣٣٣ Ⅷ123 3.14e-9",
    "x\x04y\u{F0000}!\x04!\u{400C3}",
    "'LLx 'Sx I'D 'ſ D'ſ'Se IT'S'lle",
    ".\n\nx a \n\n b\n \n \r\n\t!\n/foo //\n",
    "\tfoo\u{a0}foo_foo\nfoo\t%s\t(i",
    "XMLHttpRequest éÉ ǅabc ʰA 中A \u{301}a\u{301}A_A中B!\u{301}'লৈe\u{301}'S",
    "\u{898}\u{323} e\u{301} \u{212B} \u{1100}\u{1161}\u{11A8} \u{A7CB}\u{10D4A}\u{88F}\u{A7CE}\u{1FAE8}",
    "<|im_start|>user\nhi<|im_end|>\n <|endoftext|> <|im_start <filename>  <s> </s>",
    "\u{1F469}\u{200D}\u{1F469} \u{1F3F3}\u{FE0F}\u{200D}\u{1F308} \u{10FFFF} \u{FEFF}bom \u{FFFD}",
    "                 17 spaces\n\n\n\t\t\t                                 33 spaces aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "The quick brown fox jumps over the lazy dog; \"quoted\", (parenthesised) — and so on... Unbelievably, antidisestablishmentarianism.",
    "def f(x: int) -> dict:\n    return {'k': x ** 2}  # comment\n\n\nclass A(B):\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 3; }\r\n\r\n#include <stdio.h>\n",
    "SELECT COUNT(*) FROM t WHERE a='b' AND c<>1; {\"k\": [1, 2, {\"z\": null}]} https://example.com/a?b=c&d=%20#frag",
    "日本語のテキスト。中文字符，测试！繁體中文 한국어 텍스트입니다",
    "Příliš žluťoučký kůň, naïve café, Ünïcödé, ÅÄÖ, straße, İstanbul'da ışık, Việt Nam đẹp",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Ամեն ինչ լավ է",
    "العربية لغة جميلة ١٢٣، עברית שפה עתיקה. فارسی اردو",
    "हिन्दी भाषा १२३ বাংলা ভাষা ગુજરાતી தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල",
    "ภาษาไทย ລາວ မြန်မာ ខ្មែរ བོད་ཡིག ქართული አማርኛ ᓀᐦᐃᔭᐍᐏᐣ Ꮳ",
    "▁a  ▁▁b a<s>b a <s> b</s><unk> <0x0A>\n\n\n a>  </b> aaaaaaaaaaaaaaaaa",
    "∑∫√ ≤≥ αβγ ℝ⊂ℂ ½ ⅓ ① Ⓐ ™ © £€¥₹",
];

/// Pieces of trouble: strung together at random they reach the corners of every pattern.
#[rustfmt::skip]
pub(crate) const ATOMS: &[&str] = &[
    "a", "b", "Z", "xyz", "The", " the", "ing", "é", "É", "ß", "ſ", "K", "İ", "ǅ", "ʰ", "中", "日本", "한", "ل", "ই", "ก",
    "'", "''", "'s", "'S", "'t", "'ll", "'LL", "'re", "'Ve", "'d", "'M", "'ſ", "\u{2019}s", " ", "  ", "   ", "\t",
    "\n", "\n\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\u{85}", "\u{a0}", "\u{2003}", "\u{2028}", "\u{3000}",
    "\u{200b}", "\u{180e}", "\u{200d}", "\u{feff}", "0", "7", "12", "345", "6789", "½", "²", "Ⅷ", "٣", "১", "①",
    "\u{301}", "\u{323}", "\u{93f}", "\u{e31}", "\u{20dd}", "\u{fe0f}", ".", ",", "!", "?", "...", "-", "--", "_",
    "/", "//", "\\", "(", ")", "{", "}", "<", ">", "<|", "|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_",
    "%s", "#", "@", "€", "\u{4}", "\0", "\u{7f}", "\u{AD}", "🙂", "👩", "🏳", "\u{1FAE8}", "\u{A7CB}", "\u{10D4A}",
    "▁", "▁▁", "<s>", "</s>", "> </", "<0x0A>", "aaaa", "\u{10FFFF}", "\u{F0000}", "\u{1100}", "\u{1161}", "\u{11A8}", "\u{212B}", "\u{FFFD}",
];

/// Random texts of [`ATOMS`] per check, and the entries of the vocabulary tried as texts.
const RANDOM_TEXTS: usize = 1_500;
const SAMPLED_ENTRIES: usize = 2_500;

/// The first text that the two encode differently.
pub(crate) fn first_difference(encoder: &FastEncoder, reference: &Reference, pieces: &TokenTable) -> Option<String> {
    let step = (pieces.id_limit() / SAMPLED_ENTRIES).max(1);
    let entries = (0..pieces.id_limit() as u32)
        .step_by(step)
        .filter_map(|id| pieces.bytes(id));
    let entries = entries
        .filter_map(|bytes| std::str::from_utf8(bytes).ok())
        .map(str::to_owned);
    let added = reference
        .added_tokens()
        .into_iter()
        .take(64)
        .map(|(_, token)| format!("a {0}\n{0} b", token.content));
    let fixed = TEXTS.iter().map(|text| (*text).to_owned());
    fixed.chain(added).chain(random_texts()).chain(entries).find(|text| {
        [true, false]
            .iter()
            .any(|specials| !agree(encoder, reference, text, *specials))
    })
}

/// Whether both give the same ids for `text`.
pub(crate) fn agree(encoder: &FastEncoder, reference: &Reference, text: &str, specials: bool) -> bool {
    let mut ids = Vec::new();
    let wanted = if specials {
        Specials::Anywhere
    } else {
        Specials::Nowhere
    };
    encoder.encode(text, wanted, None, usize::MAX, &mut ids);
    reference.encode(text, specials).is_ok_and(|expected| expected == ids)
}

/// The same texts each time: a load must not succeed by luck.
fn random_texts() -> impl Iterator<Item = String> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = move || {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize
    };
    (0..RANDOM_TEXTS).map(move |_| {
        let len = 1 + next() % 10;
        (0..len).map(|_| ATOMS[next() % ATOMS.len()]).collect()
    })
}
