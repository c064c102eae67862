//! From a `tokenizer.json` to a [`FastEncoder`], if each of its settings is one that is honoured exactly.
//!
//! Closed by design: whatever isn't recognised here is the reference's to encode, with the reason told.

use ahash::AHashMap;
use parking_lot::Mutex;
use serde_json::{json, Value};

use super::added::AddedTokens;
use super::bpe::{Alphabet, Bpe, Characters, Merge, Scratch, Unknown, MAX_IDS, MAX_MERGES, NONE};
use super::fast::{Cut, FastEncoder, Form};
use super::pieces::{byte_to_char, ByteAlphabet};
use super::reference::Reference;
use super::scan::Pattern;
use super::units::{Prefix, Units, MARK};

/// The encoder for this file, or the reason why there is none.
pub(crate) fn fast_encoder(document: &Value, reference: &Reference) -> Result<FastEncoder, String> {
    let model = &document["model"];
    let form = form(&document["normalizer"])?;
    let (cut, bpe) = match segmentation(form, &document["pre_tokenizer"])? {
        Segmentation::Pattern(pattern) => (Cut::Pattern(pattern), byte_level_bpe(model)?),
        Segmentation::Whole { prefix, splits } => {
            let (units, bpe) = sentencepiece_bpe(model, splits)?;
            (Cut::Units { units, prefix }, bpe)
        }
    };
    let (added, added_normalized) = AddedTokens::of(reference, matches!(form, Form::Spaced { .. }))?;
    Ok(FastEncoder {
        added,
        added_normalized,
        form,
        cut,
        bpe,
        scratches: Mutex::default(),
    })
}

fn form(normalizer: &Value) -> Result<Form, String> {
    let steps = match (normalizer["type"].as_str(), normalizer["normalizers"].as_array()) {
        _ if normalizer.is_null() => &[],
        (Some("Sequence"), Some(steps)) => steps.as_slice(),
        _ => std::slice::from_ref(normalizer),
    };
    let mark = MARK.to_string();
    let replaces = |step: &Value| {
        step["type"] == "Replace" && step["pattern"] == json!({"String": " "}) && step["content"] == mark.as_str()
    };
    let prepends = |step: &Value| step["type"] == "Prepend" && step["prepend"] == mark.as_str();
    match steps {
        [] => Ok(Form::AsWritten),
        [only] if only["type"] == "NFC" => Ok(Form::Nfc),
        [replace] if replaces(replace) => Ok(Form::Spaced { prefix: false }),
        [prepend, replace] if prepends(prepend) && replaces(replace) => Ok(Form::Spaced { prefix: true }),
        _ => Err(format!("normalizer {}", kinds(steps))),
    }
}

/// The pre-tokenizer's part.
enum Segmentation {
    /// Bytes, cut by a pattern.
    Pattern(Pattern),
    /// Characters of a text that isn't cut, or only before each space.
    Whole { prefix: Prefix, splits: bool },
}

fn segmentation(form: Form, pre_tokenizer: &Value) -> Result<Segmentation, String> {
    let steps = match (
        pre_tokenizer["type"].as_str(),
        pre_tokenizer["pretokenizers"].as_array(),
    ) {
        (Some("Sequence"), Some(steps)) => steps.as_slice(),
        _ => std::slice::from_ref(pre_tokenizer),
    };
    let refused = || Err(format!("pre-tokenizer {}", kinds(steps)));
    if matches!(form, Form::Spaced { .. }) {
        // A text without spaces can't be cut at them.
        return match steps {
            [none] if none.is_null() => Ok(()),
            [split]
                if split["type"] == "Split"
                    && split["pattern"] == json!({"String": " "})
                    && split["invert"] == false =>
            {
                Ok(())
            }
            _ => return refused(),
        }
        .map(|()| Segmentation::Whole {
            prefix: Prefix::Never,
            splits: false,
        });
    }
    match steps {
        [bytes] if is_byte_level(bytes, true) => Ok(Segmentation::Pattern(Pattern::Gpt2 { digits: false })),
        [digits, bytes]
            if digits["type"] == "Digits" && digits["individual_digits"] == true && is_byte_level(bytes, true) =>
        {
            Ok(Segmentation::Pattern(Pattern::Gpt2 { digits: true }))
        }
        [split, bytes] if split["type"] == "Split" && is_byte_level(bytes, false) => {
            split_pattern(split).map(Segmentation::Pattern)
        }
        [metaspace] if metaspace["type"] == "Metaspace" && form == Form::AsWritten => metaspace_step(metaspace),
        _ => refused(),
    }
}

/// The types of some steps, for people.
fn kinds(steps: &[Value]) -> String {
    let kinds: Vec<&str> = steps
        .iter()
        .map(|step| step["type"].as_str().unwrap_or("none"))
        .collect();
    kinds.join(", ")
}

fn metaspace_step(step: &Value) -> Result<Segmentation, String> {
    if step["replacement"] != MARK.to_string().as_str() {
        return Err(format!("Metaspace with replacement {}", step["replacement"]));
    }
    let prefix = match (step["prepend_scheme"].as_str(), step["add_prefix_space"].as_bool()) {
        (Some("never"), _) | (_, Some(false)) => Prefix::Never,
        (Some("first"), _) => Prefix::First,
        (Some("always") | None, _) => Prefix::Always,
        (Some(other), _) => return Err(format!("Metaspace with scheme {other}")),
    };
    Ok(Segmentation::Whole {
        prefix,
        splits: step["split"].as_bool().unwrap_or(true),
    })
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

/// Refuses a model that isn't plain BPE.
fn is_plain_bpe(model: &Value) -> Result<(), String> {
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
    Ok(())
}

fn byte_level_bpe(model: &Value) -> Result<Bpe, String> {
    is_plain_bpe(model)?;
    let vocab = vocab(&model["vocab"])?;
    let mut byte_ids = Box::new([NONE; 256]);
    for byte in 0..=255u8 {
        let spelling = byte_to_char(byte).to_string();
        byte_ids[usize::from(byte)] = vocab.get(spelling.as_str()).copied().unwrap_or(NONE);
    }
    let has_fallback = !model["unk_token"].is_null() || model["byte_fallback"] == true;
    if has_fallback && byte_ids.contains(&NONE) {
        return Err("BPE with a fallback for absent bytes".to_owned());
    }
    let merges: Vec<Merge> = merges(&model["merges"], &vocab)?
        .into_iter()
        .map(|merge| merge.ids)
        .collect();
    let alphabet = ByteAlphabet::new();
    // An entry outside the alphabet is never the whole of a piece, nor made by a merge.
    let tokens: Vec<(Vec<u8>, u32)> = vocab
        .iter()
        .filter_map(|(spelling, id)| Some((alphabet.bytes_of(spelling)?, *id)))
        .filter(|(bytes, _)| !bytes.is_empty())
        .collect();
    let whole_words = model["ignore_merges"] == true;
    Ok(Bpe::new(Alphabet::Bytes(byte_ids), &merges, &tokens, whole_words))
}

/// A model over characters, and where its texts may be cut. What the cuts rest on is made sure of here: each symbol
/// spells a stretch of the text, and what stands for unknown characters is never merged.
fn sentencepiece_bpe(model: &Value, splits: bool) -> Result<(Units, Bpe), String> {
    is_plain_bpe(model)?;
    let vocab = vocab(&model["vocab"])?;
    let mut spelled: Vec<u32> = vocab.values().copied().collect();
    spelled.sort_unstable();
    if spelled.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err("an id with two spellings".to_owned());
    }
    let mark = MARK.to_string();
    if !vocab.contains_key(mark.as_str()) {
        return Err(format!("BPE without a token for {MARK}"));
    }
    let (unknown, unmerged) = unknown(model, &vocab)?;
    let merges = merges(&model["merges"], &vocab)?;
    if merges
        .iter()
        .any(|merge| unmerged.contains(&merge.ids.left) || unmerged.contains(&merge.ids.right))
    {
        return Err("a merge of what stands for unknown characters".to_owned());
    }
    let spaced = |c: char| if c == MARK { ' ' } else { c };
    let mut joins: Vec<(char, char)> = merges
        .iter()
        .filter_map(|merge| Some((merge.left.chars().next_back()?, merge.right.chars().next()?)))
        .map(|(a, b)| (spaced(a), spaced(b)))
        .collect();
    joins.sort_unstable();
    joins.dedup();
    // In the text that the model sees there is no space, so an entry with one is never met.
    let entries = || vocab.iter().filter(|(spelling, _)| !spelling.contains(' '));
    let known = entries().filter_map(|(spelling, id)| {
        let mut chars = spelling.chars();
        let only = chars.next()?;
        chars.next().is_none().then_some((spaced(only), *id))
    });
    let alphabet = Alphabet::Characters(Characters::new(known, unknown));
    let tokens: Vec<(Vec<u8>, u32)> = entries()
        .filter(|(spelling, _)| !spelling.is_empty())
        .map(|(spelling, id)| (spelling.replace(MARK, " ").into_bytes(), *id))
        .collect();
    let merges: Vec<Merge> = merges.into_iter().map(|merge| merge.ids).collect();
    let bpe = Bpe::new(alphabet, &merges, &tokens, false);
    let mut units = Units::new(&joins, splits);
    if model["ignore_merges"] == true {
        let (mut scratch, mut ids) = (Scratch::default(), Vec::new());
        let unmade = tokens.into_iter().filter(|(bytes, id)| {
            ids.clear();
            bpe.encode(bytes, 0, bytes.len(), &mut scratch, &mut ids);
            ids != [*id]
        });
        units = units.taking_whole(unmade.collect::<Vec<_>>().into_iter());
    }
    Ok((units, bpe))
}

/// What stands for characters that the vocabulary lacks, and its ids.
fn unknown(model: &Value, vocab: &Vocab<'_>) -> Result<(Unknown, Vec<u32>), String> {
    if model["byte_fallback"] == true {
        let mut ids = Box::new([NONE; 256]);
        for (byte, id) in ids.iter_mut().enumerate() {
            let spelling = format!("<0x{byte:02X}>");
            // With some of them absent the reference mixes bytes and the unknown token, in an order of its own.
            *id = *vocab
                .get(spelling.as_str())
                .ok_or_else(|| format!("byte fallback without {spelling}"))?;
        }
        let all = ids.to_vec();
        return Ok((Unknown::Bytes(ids), all));
    }
    let id = model["unk_token"]
        .as_str()
        .and_then(|unknown| vocab.get(unknown))
        .copied()
        .ok_or("BPE over characters without an unknown token")?;
    let fused = model["fuse_unk"] == true;
    Ok((Unknown::Token { id, fused }, vec![id]))
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

/// A merge and how its parts are spelled.
struct SpelledMerge<'a> {
    left: &'a str,
    right: &'a str,
    ids: Merge,
}

/// The merges in order of rank; each is written as `"a b"` or as `["a", "b"]`.
fn merges<'a>(merges: &'a Value, vocab: &Vocab<'_>) -> Result<Vec<SpelledMerge<'a>>, String> {
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
            Ok(SpelledMerge {
                left,
                right,
                ids: Merge {
                    left: id(left)?,
                    right: id(right)?,
                    merged: id(&joined)?,
                },
            })
        })
        .collect()
}
