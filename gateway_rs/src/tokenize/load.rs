//! From a `tokenizer.json` to a [`FastEncoder`], if each of its settings is one that is honoured exactly.
//!
//! Closed by design: whatever isn't recognised here is the reference's to encode, with the reason told.

use ahash::AHashMap;
use parking_lot::Mutex;
use serde_json::Value;

use super::added::AddedTokens;
use super::bpe::{Bpe, Merge, MAX_IDS, MAX_MERGES, NONE};
use super::fast::FastEncoder;
use super::pieces::{byte_to_char, ByteAlphabet};
use super::reference::Reference;
use super::scan::Pattern;

/// The encoder for this file, or the reason why there is none.
pub(crate) fn fast_encoder(document: &Value, reference: &Reference) -> Result<FastEncoder, String> {
    let nfc = normalizes_nfc(&document["normalizer"])?;
    let pattern = pattern(&document["pre_tokenizer"])?;
    let bpe = bpe(&document["model"])?;
    let (added, added_normalized) = AddedTokens::of(reference)?;
    Ok(FastEncoder {
        added,
        added_normalized,
        nfc,
        pattern,
        bpe,
        scratches: Mutex::default(),
    })
}

fn normalizes_nfc(normalizer: &Value) -> Result<bool, String> {
    match (normalizer, normalizer["type"].as_str()) {
        (Value::Null, _) => Ok(false),
        (_, Some("NFC")) => Ok(true),
        (_, Some("Sequence")) => match normalizer["normalizers"].as_array().map(Vec::as_slice) {
            Some([]) => Ok(false),
            Some([only]) => normalizes_nfc(only),
            _ => Err("normalizer Sequence".to_owned()),
        },
        (_, kind) => Err(format!("normalizer {}", kind.unwrap_or("?"))),
    }
}

fn pattern(pre_tokenizer: &Value) -> Result<Pattern, String> {
    let single = std::slice::from_ref(pre_tokenizer);
    let steps = match (
        pre_tokenizer["type"].as_str(),
        pre_tokenizer["pretokenizers"].as_array(),
    ) {
        (Some("Sequence"), Some(steps)) => steps.as_slice(),
        _ => single,
    };
    match steps {
        [bytes] if is_byte_level(bytes, true) => Ok(Pattern::Gpt2 { digits: false }),
        [digits, bytes]
            if digits["type"] == "Digits" && digits["individual_digits"] == true && is_byte_level(bytes, true) =>
        {
            Ok(Pattern::Gpt2 { digits: true })
        }
        [split, bytes] if split["type"] == "Split" && is_byte_level(bytes, false) => split_pattern(split),
        _ => {
            let kinds: Vec<&str> = steps
                .iter()
                .map(|step| step["type"].as_str().unwrap_or("none"))
                .collect();
            Err(format!("pre-tokenizer {}", kinds.join(", ")))
        }
    }
}

fn is_byte_level(step: &Value, splits: bool) -> bool {
    step["type"] == "ByteLevel"
        && step["add_prefix_space"] == false
        && step["use_regex"].as_bool().unwrap_or(true) == splits
}

fn split_pattern(split: &Value) -> Result<Pattern, String> {
    // Our patterns match every character, so cutting matches out and dropping what is between them are the same.
    let isolated = split["behavior"] == "Isolated" && split["invert"] == false;
    let kept = split["behavior"] == "Removed" && split["invert"] == true;
    if !isolated && !kept {
        return Err(format!(
            "Split with behavior {}, invert {}",
            split["behavior"], split["invert"]
        ));
    }
    let expression = split["pattern"]["Regex"]
        .as_str()
        .ok_or("Split without an expression")?;
    Pattern::of_expression(expression).ok_or_else(|| "unknown Split expression".to_owned())
}

fn bpe(model: &Value) -> Result<Bpe, String> {
    // Old files leave the type out; only BPE has merges.
    if model["type"] != "BPE" && !(model["type"].is_null() && model["merges"].is_array()) {
        return Err(format!("model {}", model["type"].as_str().unwrap_or("?")));
    }
    if model["dropout"].as_f64().unwrap_or(0.0) != 0.0 {
        return Err("BPE with dropout".to_owned());
    }
    for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[affix].as_str().is_some_and(|affix| !affix.is_empty()) {
            return Err(format!("BPE with {affix}"));
        }
    }
    let vocab = vocab(&model["vocab"])?;
    let mut byte_ids = [NONE; 256];
    for byte in 0..=255u8 {
        let spelling = byte_to_char(byte).to_string();
        byte_ids[usize::from(byte)] = vocab.get(spelling.as_str()).copied().unwrap_or(NONE);
    }
    let has_fallback = !model["unk_token"].is_null() || model["byte_fallback"] == true;
    if has_fallback && byte_ids.contains(&NONE) {
        return Err("BPE with a fallback for absent bytes".to_owned());
    }
    let merges = merges(&model["merges"], &vocab)?;
    let alphabet = ByteAlphabet::new();
    // An entry outside the alphabet is never the whole of a piece, nor made by a merge.
    let tokens: Vec<(Vec<u8>, u32)> = vocab
        .iter()
        .filter_map(|(spelling, id)| Some((alphabet.bytes_of(spelling)?, *id)))
        .filter(|(bytes, _)| !bytes.is_empty())
        .collect();
    Ok(Bpe::new(byte_ids, &merges, &tokens, model["ignore_merges"] == true))
}

type Vocab<'a> = AHashMap<&'a str, u32>;

fn vocab(vocab: &Value) -> Result<Vocab<'_>, String> {
    let entries = vocab.as_object().ok_or("BPE without a vocabulary")?;
    entries
        .iter()
        .map(|(spelling, id)| {
            let id = id
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .filter(|id| (*id as usize) < MAX_IDS);
            Ok((spelling.as_str(), id.ok_or_else(|| format!("an id beyond {MAX_IDS}"))?))
        })
        .collect()
}

/// The merges in order of rank; each is written as `"a b"` or as `["a", "b"]`.
fn merges(merges: &Value, vocab: &Vocab<'_>) -> Result<Vec<Merge>, String> {
    let merges = merges.as_array().ok_or("BPE without merges")?;
    if merges.len() > MAX_MERGES {
        return Err(format!("more than {MAX_MERGES} merges"));
    }
    let mut joined = String::new();
    merges
        .iter()
        .map(|merge| {
            let pair = match merge {
                Value::String(pair) => pair.split_once(' ').filter(|(_, right)| !right.contains(' ')),
                Value::Array(pair) => match pair.as_slice() {
                    [Value::String(left), Value::String(right)] => Some((left.as_str(), right.as_str())),
                    _ => None,
                },
                _ => None,
            };
            let (left, right) = pair.ok_or("a merge that is no pair")?;
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let id = |spelling: &str| {
                vocab
                    .get(spelling)
                    .copied()
                    .ok_or_else(|| "a merge outside the vocabulary".to_owned())
            };
            Ok(Merge {
                left: id(left)?,
                right: id(right)?,
                merged: id(&joined)?,
            })
        })
        .collect()
}
