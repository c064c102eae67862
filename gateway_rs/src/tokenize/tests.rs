//! Our own encoder against the reference, on models of every family: trained here on a little text, and on the files that
//! `HEADRACE_TOKENIZER_JSON` names (separated by colons).
#![allow(clippy::unwrap_used)]

use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{json, Value};
use tokenizers::models::bpe::{BpeTrainer, BPE};
use tokenizers::models::TrainerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::utils::SysRegex;

use super::check::{agree, ATOMS, TEXTS};
use super::fast::{is_inert, Cut};
use super::reference::Reference;
use super::scan::{expressions, Pattern};
use super::stretches::{Remembered, Stretches};
use super::*;
use crate::detok::StreamDecoder;

/// The model part of a tokenizer.json: byte-level BPE, 600 merges trained on the texts of the load check.
static MODEL: LazyLock<Value> = LazyLock::new(|| {
    let trainer = BpeTrainer::builder()
        .vocab_size(856)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    // Without U+0004, which one of the models has no token for.
    let texts = TEXTS.iter().copied().filter(|text| !text.contains('\x04'));
    tokenizer
        .train(&mut TrainerWrapper::BpeTrainer(trainer), texts)
        .unwrap();
    serde_json::to_value(&*tokenizer).unwrap()["model"].take()
});

pub(super) fn added(id: u32, content: &str, set: &[&str]) -> Value {
    let has = |flag| set.contains(&flag);
    json!({
        "id": id, "content": content, "special": has("special"), "normalized": has("normalized"),
        "lstrip": has("lstrip"), "rstrip": has("rstrip"), "single_word": has("single_word"),
    })
}

fn split(expression: &str) -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
        byte_level(false),
    ]})
}

fn byte_level(splits: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits})
}

fn digits() -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true},
        byte_level(true),
    ]})
}

/// A tokenizer.json with the usual special tokens, to be altered by `alter`.
fn document(pre_tokenizer: Value, alter: impl FnOnce(&mut Value)) -> Value {
    let mut document = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(856, "<|im_start|>", &["special"]),
            added(857, "<|im_end|>", &["special"]),
            added(858, "<|endoftext|>", &["special"]),
        ],
        "normalizer": null, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": byte_level(true),
        "model": MODEL.clone(),
    });
    alter(&mut document);
    document
}

/// One document a family, with the plan that it must get.
fn families() -> Vec<(&'static str, Value)> {
    let whole_words = |document: &mut Value| document["model"]["ignore_merges"] = json!(true);
    let nfc = |document: &mut Value| document["normalizer"] = json!({"type": "NFC"});
    vec![
        ("fast:gpt2", document(byte_level(true), |_| ())),
        ("fast:gpt2-digits", document(digits(), without_some_bytes)),
        ("fast:cl100k", document(split(expressions::CL100K), whole_words)),
        ("fast:qwen2", document(split(expressions::QWEN2), nfc)),
        ("fast:o200k", document(split(expressions::O200K), awkward_added_tokens)),
        ("fast:tekken", document(split(expressions::TEKKEN), |_| ())),
    ]
}

/// A run of `quick` cases, or of as many as `HEADRACE_PROPTEST_CASES` says.
pub(crate) fn runner(quick: u32) -> TestRunner {
    TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(cases(quick))
    })
}

/// Random texts have the reference's ids on this file.
pub(super) fn check_random_texts(json: &[u8]) {
    let (encoder, reference) = unchecked(json);
    let stretches = Stretches::of_any_length(1 << 17);
    let remembered = Some(Remembered {
        stretches: &stretches,
        scope: b"",
    });
    let result = runner(1_000).run(&texts(), |text| {
        for specials in [true, false] {
            let wanted = if specials {
                Specials::Anywhere
            } else {
                Specials::Nowhere
            };
            let expected = reference.encode(&text, specials);
            // The second time it may be remembered.
            for remembered in [None, remembered, remembered] {
                let mut ids = Vec::new();
                encoder.encode(&text, wanted, remembered, usize::MAX, &mut ids);
                prop_assert_eq!(Ok(&ids), expected.as_ref(), "{}, {:?}", encoder.name(), text);
            }
        }
        Ok(())
    });
    assert!(result.is_ok(), "{}", result.unwrap_err());
}

/// Bytes without a token, as in SmolLM2's vocabulary.
fn without_some_bytes(document: &mut Value) {
    let vocab = document["model"]["vocab"].as_object_mut().unwrap();
    for byte in [0x04, 0x06, 0x13, 0x7F, 0xC0, 0xF2, 0xF5, 0xFF] {
        vocab.remove(&pieces::byte_to_char(byte).to_string()).unwrap();
    }
}

/// Added tokens that overlap, strip, stand alone, and are found in the normalized text.
fn awkward_added_tokens(document: &mut Value) {
    document["normalizer"] = json!({"type": "NFC"});
    let tokens = document["added_tokens"].as_array_mut().unwrap();
    tokens.extend([
        added(859, "<|", &[]),
        added(860, "{}", &["lstrip", "rstrip", "special"]),
        added(861, "the", &["single_word"]),
        added(862, "e\u{301}", &["normalized"]),
        added(863, " \n", &["rstrip"]),
        added(864, "xyz", &["single_word", "lstrip", "normalized"]),
    ]);
}

pub(super) fn bytes(document: &Value) -> Vec<u8> {
    serde_json::to_vec(document).unwrap()
}

/// The files of `HEADRACE_TOKENIZER_JSON`.
fn named_files() -> Vec<Vec<u8>> {
    let paths = std::env::var("HEADRACE_TOKENIZER_JSON").unwrap_or_default();
    paths
        .split(':')
        .filter(|path| !path.is_empty())
        .map(|path| std::fs::read(path).unwrap())
        .collect()
}

/// Texts of troublesome pieces, with the vocabulary's own words and any characters between.
pub(super) fn texts() -> impl Strategy<Value = String> {
    let atom = prop_oneof![
        6 => proptest::sample::select(ATOMS).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
        1 => "[a-zA-Z ']{1,8}",
    ];
    proptest::collection::vec(atom, 0..14).prop_map(|atoms| atoms.concat())
}

/// Cases a property: `HEADRACE_PROPTEST_CASES`, or few enough for every run.
fn cases(quick: u32) -> u32 {
    std::env::var("HEADRACE_PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(quick)
}

/// The fast encoder of a document, whatever the load check says: the tests below are the check.
pub(super) fn unchecked(json: &[u8]) -> (FastEncoder, Reference) {
    let reference = Reference::from_bytes(json).unwrap();
    let encoder = load::fast_encoder(&serde_json::from_slice(json).unwrap(), &reference).unwrap();
    (encoder, reference)
}

#[test]
fn each_family_is_encoded_by_our_own_encoder() {
    for (plan, document) in families().into_iter().chain(sentencepiece_tests::families()) {
        assert_eq!(Tokenizer::from_bytes(&bytes(&document)).unwrap().plan(), plan);
    }
}

#[test]
fn random_texts_have_the_ids_of_the_reference() {
    let documents = families()
        .iter()
        .map(|(_, document)| bytes(document))
        .chain(named_files())
        .collect::<Vec<_>>();
    for json in documents {
        check_random_texts(&json);
    }
}

#[test]
fn every_codepoint_is_cut_as_the_reference_cuts_it() {
    // The other two families are these with other limits.
    let patterns = [expressions::GPT2, expressions::CL100K, expressions::O200K];
    let patterns = patterns.map(|text| (Pattern::of_expression(text).unwrap(), SysRegex::new(text).unwrap()));
    let same = |text: &str| {
        for (pattern, regex) in &patterns {
            let mut expected = regex.find_iter(text);
            pattern.for_each_piece(text, |start, end| {
                assert_eq!(Some((start, end)), expected.next(), "{pattern:?} on {text:?}");
                true
            });
            assert_eq!(expected.next(), None);
        }
    };
    // The ends of texts for one character of each range of the table; the neighbourhoods for all.
    for (first, _) in classes_table::RANGES {
        let c = char::from_u32(*first).unwrap();
        [format!("{c}"), format!("a{c}"), format!(" {c}"), format!("'{c}")]
            .iter()
            .for_each(|text| same(text));
    }
    let all: Vec<char> = ('\0'..=char::MAX).collect();
    for block in all.chunks(4096) {
        same(&block.iter().map(|c| format!("{c}'{c}x{c}1 {c}\n")).collect::<String>());
    }
}

#[test]
fn every_codepoint_has_the_ids_of_the_reference() {
    let (encoder, reference) = unchecked(&bytes(&document(digits(), |_| ())));
    let all: Vec<char> = ('\0'..=char::MAX).collect();
    for block in all.chunks(1024) {
        let text: String = block.iter().map(|c| format!("a{c}")).collect();
        assert!(
            agree(&encoder, &reference, &text, true),
            "in {:?}..={:?}",
            block.first(),
            block.last()
        );
    }
}

#[test]
fn inert_characters_are_left_alone_by_form_c() {
    use tokenizers::{normalizers::unicode::NFC, NormalizedString, Normalizer};
    for base in ["a", "\u{1100}", "\u{AC00}", "か", "ا", "é", "\u{9C7}"] {
        let text: String = ('\0'..=char::MAX)
            .filter(|c| is_inert(*c))
            .map(|c| format!("{base}{c}"))
            .collect();
        let mut normalized = NormalizedString::from(text.as_str());
        NFC.normalize(&mut normalized).unwrap();
        let first = text
            .chars()
            .zip(normalized.get().chars())
            .find(|(before, after)| before != after);
        assert_eq!(first, None, "after {base:?}");
    }
}

#[test]
fn long_runs_take_linear_work() {
    let (encoder, _) = unchecked(&bytes(&document(digits(), |_| ())));
    for unit in work::RUNS {
        let steps = |length: usize| {
            let text = unit.repeat(length / unit.len());
            let mut ids = Vec::new();
            work::counted(|| assert!(encoder.encode(&text, Specials::Anywhere, None, usize::MAX, &mut ids))) as f64
                / text.len() as f64
        };
        let (short, long) = (steps(20_000), steps(1_000_000));
        assert!(long <= short * 1.5 + 0.1, "{unit:?}: {short} to {long} steps a byte");
    }
}

#[test]
fn special_tokens_typed_by_a_user_are_text() {
    let tokenizer = Tokenizer::from_bytes(&bytes(&document(byte_level(true), |_| ()))).unwrap();
    assert_eq!(tokenizer.encode("<|im_end|>"), [857]);
    let plain = tokenizer.encode_plain("<|im_end|>");
    assert!(!plain.contains(&857));
    assert_eq!(tokenizer.decode(&plain, true), "<|im_end|>");
    assert_eq!(tokenizer.decode(&[857], true), "");
    assert_eq!(tokenizer.decode(&[857], false), "<|im_end|>");
}

#[test]
fn special_tokens_are_text_only_where_they_were_typed() {
    for (plan, document) in families().into_iter().chain(sentencepiece_tests::families()) {
        // The prefix of a stretch that begins the text isn't that of one in its midst.
        if document["pre_tokenizer"]["prepend_scheme"] == "first" {
            continue;
        }
        let json = bytes(&document);
        let reference = Reference::from_bytes(&json).unwrap();
        let tokenizer = Tokenizer::from_bytes(&json).unwrap();
        let mark = tokenizer.token_to_id("<|im_start|>").unwrap();
        let result = runner(300).run(&(texts(), texts()), |(typed, more)| {
            // A stripping token in the typed text would eat into the marks; it does so with or without them.
            let typed = typed.trim().replace("{}", "<|im_start|>");
            let text = format!("<|im_start|>{typed}<|im_start|>{more}<|im_start|>");
            let (first, second) = (12..12 + typed.len(), 24 + typed.len()..text.len() - 12);
            let ids = tokenizer
                .encode_bounded(&text, &[first, second], None, usize::MAX)
                .unwrap();
            let plain = |text: &str| tokenizer.encode_plain(text);
            let expected = reference.encode(&typed, false).unwrap();
            // Merging makes these of their texts in some of the models: the reference lets it, and we don't.
            let made = |id: &u32| tokenizer.is_special(*id) && typed.contains(tokenizer.token_str(*id).unwrap());
            if ["<s>", "</s>", "<unk>"].iter().any(|text| typed.contains(text)) {
                prop_assert!(!plain(&typed).iter().any(made), "{}: {:?}", plan, typed);
            } else {
                prop_assert_eq!(&plain(&typed), &expected);
            }
            let apart = [vec![mark], plain(&typed), vec![mark], plain(&more), vec![mark]].concat();
            prop_assert_eq!(ids, apart, "{}: {:?}", plan, text);
            Ok(())
        });
        assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}

#[test]
fn a_special_token_that_merging_makes_of_its_text_is_none_where_it_was_typed() {
    let mut document = sentencepiece_tests::families().remove(8).1;
    // Taken whole: a piece that is just this text.
    document["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let tokenizer = Tokenizer::from_bytes(&bytes(&document)).unwrap();
    assert_eq!(tokenizer.encode("</s>"), [2]);
    assert!(!tokenizer.encode_plain("</s>").contains(&2));
    assert!(!tokenizer.encode_plain("a</s>").contains(&2));
}

#[test]
fn the_token_limit_refuses_before_and_while_encoding() {
    for pre_tokenizer in [byte_level(true), json!({"type": "Whitespace"})] {
        let tokenizer = Tokenizer::from_bytes(&bytes(&document(pre_tokenizer, |_| ()))).unwrap();
        let text = "one two three ".repeat(50);
        let count = tokenizer.encode(&text).len();
        assert_eq!(tokenizer.encode_bounded(&text, &[], None, count).unwrap().len(), count);
        let refused = tokenizer.encode_bounded(&text, &[], None, count - 1);
        assert_eq!(
            refused,
            Err(EncodeError::TooLong {
                max_tokens: count - 1,
                at_least: count
            })
        );
        assert!(matches!(
            tokenizer.encode_bounded(&text, &[], None, 2),
            Err(EncodeError::TooLong { at_least: 3.., .. })
        ));
        assert_eq!(tokenizer.encode_bounded("", &[], None, 0), Ok(vec![]));
    }
}

#[test]
fn what_our_encoder_does_not_understand_the_reference_encodes_with_the_reason() {
    let plan = |alter: fn(&mut Value)| {
        Tokenizer::from_bytes(&bytes(&document(byte_level(true), alter)))
            .unwrap()
            .plan()
            .to_owned()
    };
    assert_eq!(
        plan(|d| d["normalizer"] = json!({"type": "Lowercase"})),
        "reference:normalizer Lowercase"
    );
    assert_eq!(
        plan(|d| d["pre_tokenizer"] = json!({"type": "Whitespace"})),
        "reference:pre-tokenizer Whitespace"
    );
    assert_eq!(
        plan(|d| d["pre_tokenizer"] = json!(null)),
        "reference:pre-tokenizer none"
    );
    assert_eq!(
        plan(|d| d["pre_tokenizer"] = split(r"\w+|\W+")),
        "reference:unknown Split expression"
    );
    assert_eq!(
        plan(|d| d["model"]["dropout"] = json!(0.5)),
        "reference:BPE with dropout"
    );
    let suffix = plan(|d| d["model"]["end_of_word_suffix"] = json!("</w>"));
    assert_eq!(suffix, "reference:BPE with end_of_word_suffix");
    let fallback = plan(|d| {
        without_some_bytes(d);
        d["model"]["unk_token"] = json!("!");
    });
    assert_eq!(fallback, "reference:BPE with a fallback for absent bytes");
}

#[test]
fn a_difference_found_at_load_hands_the_model_to_the_reference() {
    let json = bytes(&document(byte_level(true), |_| ()));
    let reference = Reference::from_bytes(&json).unwrap();
    let mut encoder = load::fast_encoder(&serde_json::from_slice(&json).unwrap(), &reference).unwrap();
    let spellings = Spellings::new(reference.spellings());
    let table = token_table(&reference, &spellings, PieceStyle::ByteLevel).unwrap();
    assert_eq!(check::first_difference(&encoder, &reference, &table), None);
    encoder.cut = Cut::Pattern(Pattern::Cl100k { digits: 3 });
    assert!(check::first_difference(&encoder, &reference, &table).is_some());
}

#[test]
fn unusable_files_are_refused_with_the_reason() {
    assert!(matches!(Tokenizer::from_bytes(b"{}"), Err(TokenizerError::Invalid(_))));
    assert!(matches!(
        Tokenizer::from_bytes(b"\xff"),
        Err(TokenizerError::Invalid(_))
    ));
    assert!(matches!(
        Tokenizer::from_file("/nonexistent/tokenizer.json"),
        Err(TokenizerError::Read { .. })
    ));
    let huge = document(byte_level(true), |d| {
        d["model"]["vocab"]["huge"] = json!(4_000_000_000u32)
    });
    assert!(matches!(
        Tokenizer::from_bytes(&bytes(&huge)),
        Err(TokenizerError::Vocabulary(_))
    ));
}

#[test]
fn a_model_without_a_token_for_unknown_characters_is_refused() {
    let words = json!({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}});
    assert!(matches!(
        Tokenizer::from_bytes(&bytes(&words)),
        Err(TokenizerError::Vocabulary(_))
    ));
}

#[test]
fn decoding_gives_the_text_back_and_is_what_the_reference_gives() {
    let json = bytes(&document(byte_level(true), |_| ()));
    let tokenizer = Arc::new(Tokenizer::from_bytes(&json).unwrap());
    let reference = Reference::from_bytes(&json).unwrap();
    let result = runner(500).run(
        &(texts(), proptest::collection::vec(0u32..870, 0..12)),
        |(text, random)| {
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text), false), text);
            prop_assert_eq!(Ok(tokenizer.decode(&random, false)), reference.decode(&random, false));
            Ok(())
        },
    );
    assert!(result.is_ok(), "{}", result.unwrap_err());
}

/// A SentencePiece-like vocabulary, which the reference encodes and we decode.
fn sentencepiece(decoder: Value) -> Value {
    let mut vocab = json!({"<unk>": 0, "<s>": 1, "▁": 259, "a": 260, "b": 261, "▁a": 262, "▁b": 263, "ab": 264});
    for byte in 0..=255u32 {
        vocab[format!("<0x{byte:02X}>")] = json!(3 + byte);
    }
    json!({
        "version": "1.0", "added_tokens": [added(1, "<s>", &["special"])],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": ["▁ a", "▁ b", "a b"]},
    })
}

#[test]
fn a_stream_gives_what_the_whole_gives_whatever_the_decoder() {
    let llama = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    for decoder in [llama, metaspace, json!(null)] {
        let json = bytes(&sentencepiece(decoder.clone()));
        let tokenizer = Arc::new(Tokenizer::from_bytes(&json).unwrap());
        let reference = Reference::from_bytes(&json).unwrap();
        // Ids of characters and words; no bytes, whose decoding isn't a stream's in the reference.
        let ids = proptest::collection::vec(259u32..265, 0..10);
        let result = runner(200).run(&ids, |ids| {
            let mut stream = StreamDecoder::new(&tokenizer, true);
            let mut text = String::new();
            ids.iter().for_each(|id| stream.push(*id, &mut text));
            stream.finish(&mut text);
            prop_assert_eq!(&text, &tokenizer.decode(&ids, true), "{}", decoder);
            prop_assert_eq!(Ok(text), reference.decode(&ids, true), "{}", decoder);
            Ok(())
        });
        assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}

/// Runs of byte tokens that are UTF-8, and such that are none from their first character on; between them other tokens.
fn byte_runs() -> impl Strategy<Value = Vec<u32>> {
    let byte = |byte: u8| 3 + u32::from(byte);
    let bytes = |bytes: &[u8]| bytes.iter().map(|&each| 3 + u32::from(each)).collect::<Vec<_>>();
    let good = proptest::collection::vec(any::<char>(), 0..4)
        .prop_map(move |text| bytes(text.into_iter().collect::<String>().as_bytes()));
    let first = proptest::sample::select(vec![
        &[0x80][..],
        &[0xFF],
        &[0xC3],
        &[0xE5, 0x8F],
        &[0xF0, 0x9F, 0x98],
        &[0xC0, 0xAF],
        &[0xED, 0xA0, 0x80],
        &[0xC3, 0x41],
        &[0xE5, 0x0A],
    ]);
    let bad = (first, proptest::collection::vec(any::<u8>(), 0..4))
        .prop_map(|(first, more)| [first, &more].concat())
        .prop_filter("is no UTF-8, from its first character on", |run| {
            std::str::from_utf8(run).is_err_and(|error| error.valid_up_to() == 0)
        })
        .prop_map(move |run| run.into_iter().map(byte).collect::<Vec<_>>());
    let between = proptest::collection::vec(proptest::sample::select(vec![1, 259, 260, 262]), 1..3);
    proptest::collection::vec((prop_oneof![good, bad], between), 0..4).prop_map(|runs| {
        runs.into_iter()
            .flat_map(|(run, between)| [run, between].concat())
            .collect()
    })
}

#[test]
fn runs_of_byte_tokens_are_text_as_a_whole_or_not_at_all() {
    for strips in [false, true] {
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if strips {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let json = bytes(&sentencepiece(json!({"type": "Sequence", "decoders": decoders})));
        let tokenizer = Arc::new(Tokenizer::from_bytes(&json).unwrap());
        let reference = Reference::from_bytes(&json).unwrap();
        let streamed = |ids: &[u32], skip_special| {
            let mut stream = StreamDecoder::new(&tokenizer, skip_special);
            let mut text = String::new();
            ids.iter().for_each(|id| stream.push(*id, &mut text));
            stream.finish(&mut text);
            text
        };
        // Any ids at all, whole.
        let any_ids = proptest::collection::vec(0u32..265, 0..24);
        let result = runner(2_000).run(&(any_ids, any::<bool>()), |(ids, skip_special)| {
            let expected = reference.decode(&ids, skip_special);
            prop_assert_eq!(Ok(tokenizer.decode(&ids, skip_special)), expected, "{:?}", ids);
            Ok(())
        });
        assert!(result.is_ok(), "{}", result.unwrap_err());
        // A stream, where nothing of a run has been shown before it goes wrong.
        let result = runner(2_000).run(&byte_runs(), |ids| {
            prop_assert_eq!(Ok(streamed(&ids, false)), reference.decode(&ids, false), "{:?}", ids);
            Ok(())
        });
        assert!(result.is_ok(), "{}", result.unwrap_err());
        // What has been shown stands.
        let ids: Vec<u32> = "é"
            .bytes()
            .chain([0xFF, b'a', 0xC3, 0xA9])
            .map(|byte| 3 + u32::from(byte))
            .collect();
        assert_eq!(streamed(&ids, true), "é\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}");
        assert_eq!(tokenizer.decode(&ids, true), "\u{FFFD}".repeat(6));
    }
}

#[test]
fn characters_of_byte_tokens_are_put_together() {
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]});
    let tokenizer = Arc::new(Tokenizer::from_bytes(&bytes(&sentencepiece(decoder))).unwrap());
    let ids = tokenizer.encode("a🙂");
    assert_eq!(tokenizer.token_bytes(ids[1]), Some(&[0xF0][..]));
    let mut stream = StreamDecoder::new(&tokenizer, true);
    let mut text = String::new();
    ids.iter().for_each(|id| stream.push(*id, &mut text));
    assert_eq!(text, " a🙂");
}
