//! SentencePiece-like models for the tests, trained here, and what is particular to them.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{json, Value};
use tokenizers::models::bpe::{BpeTrainer, BPE};
use tokenizers::models::TrainerWrapper;
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};

use super::check::{agree, TEXTS};
use super::reference::Reference;
use super::tests::{added, bytes, check_random_texts, unchecked};
use super::*;
use crate::detok::StreamDecoder;

/// Spellings trained on the texts of the load check, in order of rank: within words, or across them.
static WORDS: LazyLock<Vec<String>> = LazyLock::new(|| spellings(false));
static PHRASES: LazyLock<Vec<String>> = LazyLock::new(|| spellings(true));

fn spellings(across_words: bool) -> Vec<String> {
    let trainer = BpeTrainer::builder().vocab_size(900).show_progress(false).build();
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer
        .with_normalizer(Some(Replace::new(" ", "▁").unwrap()))
        .unwrap();
    if !across_words {
        tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', PrependScheme::Always, true)));
    }
    // Of the scripts only some, so that there are unknown characters.
    let texts = TEXTS[..20].iter().chain(&TEXTS[21..23]).copied();
    tokenizer
        .train(&mut TrainerWrapper::BpeTrainer(trainer), texts)
        .unwrap();
    let mut entries: Vec<(String, u32)> = tokenizer.get_vocab(false).into_iter().collect();
    entries.sort_by_key(|(_, id)| *id);
    let mut spellings: Vec<String> = entries.into_iter().map(|(spelling, _)| spelling).collect();
    // What real vocabularies have besides: runs of spaces, and a piece that holds a space.
    spellings.extend(
        [
            "▁▁",
            "▁▁▁",
            "▁▁▁▁",
            "▁▁▁▁▁▁▁▁",
            ">▁",
            ">▁<",
            ">▁</",
            "aa",
            "aaa",
            "aaaa",
        ]
        .map(str::to_owned),
    );
    let mut seen = std::collections::HashSet::new();
    spellings.retain(|spelling| !spelling.contains(' ') && seen.insert(spelling.clone()));
    spellings
}

/// A BPE model as converters make it of a SentencePiece file: every way to split an entry is a merge.
fn model(spellings: &[String], fallback: bool, fuse_unknown: bool, ignore_merges: bool) -> Value {
    let mut vocab = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    if fallback {
        vocab.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    }
    vocab.extend(["▁", ">", "<", "/", "a"].map(str::to_owned));
    let specials = vocab.len();
    for spelling in spellings {
        if !vocab[3..].contains(spelling) {
            vocab.push(spelling.clone());
        }
    }
    let ids: HashMap<&str, usize> = vocab.iter().enumerate().map(|(id, text)| (text.as_str(), id)).collect();
    let mut merges = Vec::new();
    for spelling in &vocab[specials..] {
        let cuts = spelling.char_indices().skip(1).map(|(at, _)| spelling.split_at(at));
        let mut splits: Vec<_> = cuts
            .filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?, left, right)))
            .collect();
        splits.sort_unstable();
        merges.extend(splits.iter().map(|(_, _, left, right)| json!([left, right])));
    }
    json!({
        "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": fuse_unknown, "byte_fallback": fallback,
        "ignore_merges": ignore_merges, "vocab": ids, "merges": merges,
    })
}

fn document(normalizer: &Value, pre_tokenizer: &Value, model: Value, normalized: bool) -> Value {
    let prefixed = normalizer["type"] == "Sequence" || pre_tokenizer["type"] == "Metaspace";
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefixed {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let flags: &[&str] = if normalized {
        &["special", "normalized"]
    } else {
        &["special"]
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(0, "<unk>", flags), added(1, "<s>", flags), added(2, "</s>", flags),
            added(5_000, "<|im_start|>", &["special"]), added(5_001, "\n\n", &[]), added(5_002, "{}", &["lstrip"]),
            added(5_003, "the", &["single_word", "normalized"]),
        ],
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders}, "model": model,
    })
}

fn replace() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

fn prepend_and_replace() -> Value {
    json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace()]})
}

fn metaspace(scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
}

/// Every way that models of this family are written, and some nastier ones.
pub(super) fn families() -> Vec<(&'static str, Value)> {
    let none = Value::Null;
    let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    let words = |fallback, fuse, ignore| model(&WORDS, fallback, fuse, ignore);
    let phrases = |fallback, fuse, ignore| model(&PHRASES, fallback, fuse, ignore);
    let llama2 = document(&prepend_and_replace(), &none, words(true, true, false), false);
    let llama2_normalized = document(&prepend_and_replace(), &none, words(true, true, false), true);
    let mistral3 = document(&none, &metaspace("first", false), words(true, true, false), false);
    let gemma = document(&replace(), &split, phrases(true, true, false), false);
    let documents = [
        llama2,
        llama2_normalized,
        mistral3,
        gemma,
        document(&prepend_and_replace(), &none, phrases(false, true, true), true),
        document(&none, &metaspace("always", true), phrases(false, true, true), false),
        document(&none, &metaspace("always", false), phrases(false, false, false), true),
        document(&none, &metaspace("never", true), words(true, false, true), false),
        document(&replace(), &none, phrases(false, false, true), true),
    ];
    documents.map(|document| ("fast:sentencepiece", document)).into()
}

/// The texts that the family is known to go wrong on.
const HARD: &[&str] = &[
    "",
    " ",
    "a",
    " a",
    "  a",
    "▁a",
    "▁",
    "▁▁a",
    "a▁ b",
    "a<s>b",
    "a <s> b",
    "<s>a",
    "<s> a",
    " <s>",
    "</s><s>",
    "\n",
    "\n\n",
    "a\n\nb",
    "👩\u{200d}👩",
    "\u{10FFFF}",
    "\0",
    "ሀሁሂ ሀ ሁ",
    "ሀaሁ",
    "aaaaaaaaaaaaaaaaa",
    "                 x",
    "a>  </b",
    "a> </b> <",
    "<0x0A>",
    "<unk>",
    "a<unk>b",
    " the the",
    "xthe",
    "the",
    "a {}b {}",
    "   {} {}",
];

#[test]
fn the_familys_hard_texts_have_the_ids_of_the_reference() {
    for (_, document) in families() {
        let (encoder, reference) = unchecked(&bytes(&document));
        for text in HARD.iter().chain(TEXTS) {
            for specials in [true, false] {
                assert!(
                    agree(&encoder, &reference, text, specials),
                    "{text:?} of {} {}",
                    document["normalizer"],
                    document["pre_tokenizer"]
                );
            }
        }
    }
}

#[test]
fn whatever_merges_there_are_the_ids_are_the_references() {
    // Vocabularies of a few characters with any merges between them: cuts must hold for all of them.
    let alphabet = ["a", "b", "▁", "é", "中"];
    let mut runner = super::tests::runner(300);
    let pairs = proptest::collection::vec((0usize..40, 0usize..40), 0..25);
    let switches = (any::<bool>(), any::<bool>(), any::<bool>());
    let texts = proptest::collection::vec("[ab é中x▁ф]{0,24}", 8);
    let result = runner.run(&(pairs, switches, texts), |(pairs, (fallback, fuse, ignore), texts)| {
        let mut spellings: Vec<String> = alphabet.map(str::to_owned).into();
        let mut merges = Vec::new();
        for (left, right) in pairs {
            let (left, right) = (&spellings[left % spellings.len()], &spellings[right % spellings.len()]);
            let joined = format!("{left}{right}");
            merges.push(json!([left, right]));
            if !spellings.contains(&joined) {
                spellings.push(joined);
            }
        }
        let mut model = model(&spellings, fallback, fuse, ignore);
        // `a` comes first in the list of all; its ids don't matter, the order of the merges does.
        model["merges"] = json!(merges);
        let document = document(&replace(), &Value::Null, model, false);
        let (encoder, reference) = unchecked(&bytes(&document));
        for text in texts {
            prop_assert!(agree(&encoder, &reference, &text, true), "{:?}", text);
        }
        Ok(())
    });
    assert!(result.is_ok(), "{}", result.unwrap_err());
}

#[test]
fn random_texts_have_the_ids_of_the_reference() {
    for (_, document) in families() {
        check_random_texts(&bytes(&document));
    }
}

#[test]
fn a_text_of_megabytes_takes_linear_work() {
    for (_, document) in families() {
        let (encoder, _) = unchecked(&bytes(&document));
        for unit in work::RUNS.iter().chain(&["ሀ", "▁", "> ", "<"]) {
            let steps = |length: usize| {
                let text = unit.repeat(length / unit.len());
                let mut ids = Vec::new();
                work::counted(|| assert!(encoder.encode(&text, Specials::Anywhere, None, usize::MAX, &mut ids))) as f64
                    / text.len() as f64
            };
            let (short, long) = (steps(20_000), steps(500_000));
            assert!(long <= short * 1.5 + 0.1, "{unit:?}: {short} to {long} steps a byte");
        }
    }
}

#[test]
fn what_cuts_could_not_rest_on_is_the_references() {
    let plan = |alter: fn(&mut Value)| {
        let mut document = document(&replace(), &Value::Null, model(&WORDS, true, true, false), false);
        alter(&mut document);
        Tokenizer::from_bytes(&bytes(&document)).unwrap().plan().to_owned()
    };
    let without_byte = plan(|d| drop(d["model"]["vocab"].as_object_mut().unwrap().shift_remove("<0xC3>")));
    assert_eq!(without_byte, "reference:byte fallback without <0xC3>");
    let merged_byte = plan(|d| {
        d["model"]["vocab"]["<0x41>a"] = json!(6_000);
        d["model"]["merges"]
            .as_array_mut()
            .unwrap()
            .push(json!(["<0x41>", "a"]));
    });
    assert_eq!(merged_byte, "reference:a merge of what stands for unknown characters");
    let twice = plan(|d| d["model"]["vocab"]["zzz"] = json!(3));
    assert_eq!(twice, "reference:an id with two spellings");
    let stripping = plan(|d| {
        let tokens = d["added_tokens"].as_array_mut().unwrap();
        tokens.push(added(5_004, "[M]", &["normalized", "lstrip"]));
    });
    assert_eq!(stripping, "reference:a normalized added token that strips spaces");
    assert_eq!(
        plan(|d| d["pre_tokenizer"] = json!({"type": "Whitespace"})),
        "reference:pre-tokenizer Whitespace"
    );
    let other = plan(|d| d["normalizer"] = json!({"type": "Prepend", "prepend": "▁"}));
    assert_eq!(other, "reference:normalizer Prepend");
}

#[test]
fn decoding_is_what_the_reference_gives_and_a_stream_gives_the_same() {
    for (_, document) in families() {
        let json = bytes(&document);
        let tokenizer = Arc::new(Tokenizer::from_bytes(&json).unwrap());
        let reference = Reference::from_bytes(&json).unwrap();
        let mut runner = super::tests::runner(300);
        let result = runner.run(&(super::tests::texts(), any::<bool>()), |(text, skip_special)| {
            let ids = tokenizer.encode(&text);
            let mut stream = StreamDecoder::new(&tokenizer, skip_special);
            let mut streamed = String::new();
            ids.iter().for_each(|id| stream.push(*id, &mut streamed));
            stream.finish(&mut streamed);
            prop_assert_eq!(&streamed, &tokenizer.decode(&ids, skip_special));
            prop_assert_eq!(Ok(streamed), reference.decode(&ids, skip_special), "{:?}", ids);
            Ok(())
        });
        assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}
