//! Text to token ids and back: the [`Tokenizer`] of one model.
//!
//! Pure: a `tokenizer.json` in, ids and text out. The data plane shares one `Arc<Tokenizer>` a model among its threads;
//! no lock is held while it works. What was encoded a while ago can be remembered beside it (`stretches`). The parts:
//! - `reference`: Hugging Face `tokenizers`. Loads every file, and is what "the right ids" means.
//! - `load`: whether our own encoder can honour a file's settings; `check`: whether it then gives the right ids.
//! - `fast`: our own encoder, out of `added` (added tokens), `scan` over `classes` (pre-tokenisation) or `units` (where
//!   there is none), `bpe` (merges).
//! - [`pieces`]: the bytes of each id.
//!
//! The way back, from ids to text, is [`crate::detok`].

mod added;
mod bpe;
mod check;
mod classes;
mod classes_table;
mod fast;
mod load;
pub mod pieces;
mod reference;
mod scan;
#[cfg(test)]
mod sentencepiece_tests;
pub mod specials;
pub mod stretches;
#[cfg(test)]
pub(crate) mod tests;
mod units;
#[cfg(test)]
mod work;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use self::fast::FastEncoder;
use added::{AddedTokens, Part};
use pieces::{ByteAlphabet, PieceEntry, TokenTable};
use reference::Reference;
use specials::{SpecialTexts, Specials};
use stretches::Remembered;

/// Why a `tokenizer.json` was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file could not be read.
    #[error("cannot read the tokenizer {path}: {source}")]
    Read {
        /// The path that was asked for.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The bytes are not a `tokenizer.json` that Hugging Face `tokenizers` accepts.
    #[error("not a usable tokenizer.json: {0}")]
    Invalid(String),
    /// The vocabulary exceeds a limit or contradicts itself.
    #[error("unusable vocabulary: {0}")]
    Vocabulary(String),
}

/// Why a text was not encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The text has more tokens than the caller allows.
    #[error("the text has at least {at_least} tokens, the limit is {max_tokens}")]
    TooLong {
        /// The caller's limit, in tokens.
        max_tokens: usize,
        /// A lower bound of the text's tokens: counted up to the refusal, or reckoned from its bytes.
        at_least: usize,
    },
    /// The reference failed; none of its failures is known to be reachable after a successful load.
    #[error("the tokenizer failed: {0}")]
    Failed(String),
}

/// One model's tokenizer. Immutable and `Sync`: share it as `Arc<Tokenizer>`.
pub struct Tokenizer {
    encoder: Encoder,
    decoder: Decoder,
    pieces: Arc<TokenTable>,
    spellings: Spellings,
    special_texts: SpecialTexts,
    hash: String,
    plan: String,
}

enum Encoder {
    Fast(Box<FastEncoder>),
    /// With the added tokens, for texts of which only a part may hold special ones.
    Reference(Arc<Reference>, Option<AddedTokens>),
}

enum Decoder {
    /// A text is its pieces' bytes one after another.
    Pieces,
    /// The model's decoder looks at several tokens at once.
    Reference(Arc<Reference>),
}

impl Tokenizer {
    /// Loads a `tokenizer.json`.
    ///
    /// # Errors
    /// When the file can't be read, or as [`Tokenizer::from_bytes`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, TokenizerError> {
        let path = path.as_ref();
        let json = std::fs::read(path).map_err(|source| TokenizerError::Read {
            path: path.display().to_string(),
            source,
        })?;
        let tokenizer = Self::load(&json);
        drop(json);
        // Loading takes several times what is kept.
        crate::memory::give_back();
        tokenizer
    }

    /// Loads the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`] for what Hugging Face `tokenizers` refuses, [`TokenizerError::Vocabulary`] for ids
    /// beyond [`pieces::MAX_TOKEN_ID`] and for models that fail on unknown characters.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TokenizerError> {
        let tokenizer = Self::load(json);
        crate::memory::give_back();
        tokenizer
    }

    fn load(json: &[u8]) -> Result<Self, TokenizerError> {
        let document: serde_json::Value =
            serde_json::from_slice(json).map_err(|error| TokenizerError::Invalid(error.to_string()))?;
        let reference = Arc::new(Reference::from_bytes(json)?);
        let style = PieceStyle::of(&document["decoder"]);
        let spellings = Spellings::new(reference.spellings());
        let pieces = Arc::new(token_table(&reference, &spellings, style)?);
        let decoder = match style {
            PieceStyle::Opaque => Decoder::Reference(Arc::clone(&reference)),
            PieceStyle::ByteLevel | PieceStyle::SentencePiece { .. } => Decoder::Pieces,
        };
        let checked = load::fast_encoder(&document, &reference).and_then(|encoder| {
            match check::first_difference(&encoder, &reference, &pieces) {
                None => Ok(encoder),
                Some(text) => Err(format!("load check failed on {text:?}")),
            }
        });
        let special_texts = SpecialTexts::new(
            reference
                .added_tokens()
                .into_iter()
                .filter(|(_, token)| reference.is_special(&token.content))
                .map(|(_, token)| token.content),
        );
        let (encoder, plan) = match checked {
            Ok(encoder) => {
                let plan = format!("fast:{}", encoder.name());
                (Encoder::Fast(Box::new(encoder)), plan)
            }
            Err(reason) => {
                let (added, _) = AddedTokens::of(&reference, false).map_err(TokenizerError::Vocabulary)?;
                (Encoder::Reference(reference, added), format!("reference:{reason}"))
            }
        };
        let hash = format!("{:x}", Sha256::digest(json));
        Ok(Self {
            encoder,
            decoder,
            pieces,
            spellings,
            special_texts,
            hash,
            plan,
        })
    }

    /// The ids of `text`, as Hugging Face `encode(text, add_special_tokens=False)`: added and special tokens written in
    /// the text are recognised, none is put around it.
    #[must_use]
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        self.encode_into(text, &mut ids);
        ids
    }

    /// The ids of text typed by a user: special tokens written in it stay plain text. Added tokens that are not special
    /// are still recognised.
    #[must_use]
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        let (whole, mut ids) = (0..text.len(), Vec::new());
        let typed = Specials::Outside(std::slice::from_ref(&whole));
        // As in `encode_into`.
        let _ = self.append(text, typed, None, usize::MAX, &mut ids);
        ids
    }

    /// [`Tokenizer::encode`], appending to `ids`.
    pub fn encode_into(&self, text: &str, ids: &mut Vec<u32>) {
        // See `EncodeError::Failed`; without a token limit nothing else can go wrong.
        let _ = self.append(text, Specials::Anywhere, None, usize::MAX, ids);
    }

    /// [`Tokenizer::encode`], refusing texts of more than `max_tokens` tokens: those whose bytes can't fit before any
    /// work is done, the others as soon as it shows. Of `text` some ranges of bytes, in order, may have been `typed` by a
    /// user: what is written like a special token and touches one of them is text. Everything else has the ids that it
    /// has elsewhere. With a memory, our own encoder does not encode the long stretches again that it knows.
    ///
    /// # Errors
    /// [`EncodeError::TooLong`], [`EncodeError::Failed`].
    pub fn encode_bounded(
        &self,
        text: &str,
        typed: &[Range<usize>],
        remembered: Option<Remembered<'_>>,
        max_tokens: usize,
    ) -> Result<Vec<u32>, EncodeError> {
        let specials = if typed.is_empty() {
            Specials::Anywhere
        } else {
            Specials::Outside(typed)
        };
        let mut ids = Vec::new();
        self.append(text, specials, remembered, max_tokens, &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of `text`; `max_tokens` counts these alone, not what `ids` held before.
    fn append(
        &self,
        text: &str,
        specials: Specials<'_>,
        remembered: Option<Remembered<'_>>,
        max_tokens: usize,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        // No token is longer, so a text over the product has more tokens. (Text that vanishes, as white space eaten by a
        // stripping added token, counts here all the same: the bound is what protects the process.)
        let longest = self.pieces.longest().max(1);
        if text.len() > max_tokens.saturating_mul(longest) {
            return Err(EncodeError::TooLong {
                max_tokens,
                at_least: text.len().div_ceil(longest),
            });
        }
        let before = ids.len();
        // Most tokens have four bytes or more.
        ids.reserve((text.len() / 4).min(max_tokens));
        match &self.encoder {
            Encoder::Fast(encoder) => {
                encoder.encode(text, specials, remembered, before.saturating_add(max_tokens), ids);
            }
            Encoder::Reference(reference, added) => {
                let encode = |text: &str, specials| reference.encode(text, specials).map_err(EncodeError::Failed);
                match (specials, added) {
                    (Specials::Anywhere, _) => ids.extend(encode(text, true)?),
                    (Specials::Nowhere, _) | (_, None) => ids.extend(encode(text, false)?),
                    (Specials::Outside(_), Some(added)) => {
                        let mut parts = Vec::new();
                        added.split(text, specials, |part| {
                            parts.push(part);
                            true
                        });
                        for part in parts {
                            match part {
                                Part::Text { text, .. } => ids.extend(encode(text, false)?),
                                Part::Token(id) => ids.push(id),
                            }
                        }
                    }
                }
            }
        }
        let count = ids.len() - before;
        if count > max_tokens {
            return Err(EncodeError::TooLong {
                max_tokens,
                at_least: count,
            });
        }
        Ok(())
    }

    /// The text of `ids` by the reference implementation, where its pieces alone don't make it.
    pub(crate) fn decoded_by_reference(&self, ids: &[u32], skip_special: bool) -> Option<String> {
        match &self.decoder {
            Decoder::Pieces => None,
            Decoder::Reference(reference) => Some(reference.decode(ids, skip_special).unwrap_or_default()),
        }
    }

    /// The bytes of `id`, not necessarily complete UTF-8; `None` for an id the vocabulary lacks.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.bytes(id)
    }

    /// How the vocabulary spells `id` (a byte-level vocabulary spells a space `Ġ`).
    #[must_use]
    pub fn token_str(&self, id: u32) -> Option<&str> {
        self.spellings.spelling(id)
    }

    /// The id with the vocabulary's spelling `token`.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.spellings.id(token)
    }

    /// Whether `id` is a special token.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// The texts of the special tokens.
    #[must_use]
    pub fn special_texts(&self) -> &SpecialTexts {
        &self.special_texts
    }

    /// One more than the largest id. Ids may be sparse: [`Tokenizer::token_bytes`] says which exist.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.pieces.id_limit()
    }

    /// SHA-256 of the file's bytes, in hexadecimal.
    #[must_use]
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Who encodes: `fast:<family>`, or `reference:<reason>` with the reason our own encoder wasn't taken.
    #[must_use]
    pub fn plan(&self) -> &str {
        &self.plan
    }

    pub(crate) fn pieces(&self) -> &Arc<TokenTable> {
        &self.pieces
    }

    /// Whether decoding must see several tokens at once, so that the pieces alone don't make the text.
    pub(crate) fn decodes_in_context(&self) -> bool {
        matches!(self.decoder, Decoder::Reference(_))
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("plan", &self.plan)
            .field("hash", &self.hash)
            .finish_non_exhaustive()
    }
}

/// How a vocabulary's spellings become bytes, by the file's `decoder`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum PieceStyle {
    /// Each character of a spelling is a byte; a spelling outside the alphabet is its own UTF-8.
    ByteLevel,
    /// `▁` is a space, `<0x0A>` a byte; one space at the start of a text is dropped if asked.
    SentencePiece { strips_first_space: bool },
    /// Anything else: the reference decodes.
    Opaque,
}

impl PieceStyle {
    fn of(decoder: &serde_json::Value) -> Self {
        if decoder["type"] == "ByteLevel" {
            return Self::ByteLevel;
        }
        let Some(steps) = decoder["decoders"].as_array().filter(|_| decoder["type"] == "Sequence") else {
            return Self::Opaque;
        };
        let space = serde_json::json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let strip = serde_json::json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        match steps.as_slice() {
            [replace, fallback, fuse, rest @ ..]
                if *replace == space && fallback["type"] == "ByteFallback" && fuse["type"] == "Fuse" =>
            {
                match rest {
                    [] => Self::SentencePiece {
                        strips_first_space: false,
                    },
                    [last] if *last == strip => Self::SentencePiece {
                        strips_first_space: true,
                    },
                    _ => Self::Opaque,
                }
            }
            [only] if only["type"] == "ByteLevel" => Self::ByteLevel,
            _ => Self::Opaque,
        }
    }
}

/// The bytes of every id, by the decoder's style.
fn token_table(reference: &Reference, spellings: &Spellings, style: PieceStyle) -> Result<TokenTable, TokenizerError> {
    let alphabet = ByteAlphabet::new();
    let bytes_of = |spelling: &str| match style {
        PieceStyle::ByteLevel => alphabet
            .bytes_of(spelling)
            .unwrap_or_else(|| spelling.as_bytes().to_vec()),
        PieceStyle::SentencePiece { .. } => match byte_token(spelling) {
            Some(byte) => vec![byte],
            None => spelling.replace('▁', " ").into_bytes(),
        },
        PieceStyle::Opaque => spelling.as_bytes().to_vec(),
    };
    let entries: Vec<PieceEntry> = spellings
        .ids()
        .filter_map(|id| {
            // Asked anew: the decoder sees a normalized added token by another spelling.
            let spelling = reference.spelling(id)?;
            Some((id, bytes_of(&spelling), reference.is_special(&spelling)))
        })
        .collect();
    let strips = style
        == PieceStyle::SentencePiece {
            strips_first_space: true,
        };
    let table = TokenTable::from_pieces(entries)?.stripping_first_space(strips);
    if !matches!(style, PieceStyle::SentencePiece { .. }) {
        return Ok(table);
    }
    let byte_of = |id| Some((id, byte_token(&reference.spelling(id)?)?));
    Ok(table.with_byte_tokens(spellings.ids().filter_map(byte_of)))
}

/// The byte of a byte-fallback token such as `<0x0A>`.
fn byte_token(spelling: &str) -> Option<u8> {
    let digits = spelling.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2)
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

/// The vocabulary's spellings, found by id and by text; no hash table, since neither is asked on the hot path.
struct Spellings {
    /// Sorted by spelling.
    entries: Vec<(Box<str>, u32)>,
    /// (id, index into `entries`), sorted.
    by_id: Vec<(u32, u32)>,
}

impl Spellings {
    fn new(entries: Vec<(String, u32)>) -> Self {
        let mut entries: Vec<(Box<str>, u32)> = entries
            .into_iter()
            .map(|(spelling, id)| (spelling.into_boxed_str(), id))
            .collect();
        entries.sort_unstable();
        let mut by_id: Vec<(u32, u32)> = (0u32..).zip(&entries).map(|(index, (_, id))| (*id, index)).collect();
        by_id.sort_unstable();
        Self { entries, by_id }
    }

    fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.by_id.iter().map(|(id, _)| *id)
    }

    fn id(&self, spelling: &str) -> Option<u32> {
        let at = self
            .entries
            .binary_search_by(|(entry, _)| (**entry).cmp(spelling))
            .ok()?;
        self.entries.get(at).map(|(_, id)| *id)
    }

    fn spelling(&self, id: u32) -> Option<&str> {
        let at = self.by_id.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        let (_, index) = self.by_id.get(at)?;
        self.entries.get(*index as usize).map(|(spelling, _)| &**spelling)
    }
}
