//! What each token id stands for: the bytes it decodes to, and whether it is special.
//!
//! Built once per model; decoding (`detok`) and log probabilities read it. The byte-level alphabet, `▁` and `<0x0A>`
//! are resolved here, so that a decoder only ever appends bytes.

use super::TokenizerError;

/// The largest token id a vocabulary may hold. The table is dense by id, so this bounds its memory.
pub const MAX_TOKEN_ID: u32 = (1 << 24) - 1;

/// A token's id, the bytes it stands for, and whether it is special (a control token without text of its own).
pub type PieceEntry = (u32, Vec<u8>, bool);

/// Token id to bytes, dense by id; ids may be sparse (an absent id has no piece).
#[derive(Debug, Default)]
pub struct TokenTable {
    /// The pieces that are complete UTF-8, one after another: appended to a `String` without being checked again.
    text: String,
    /// The pieces that are not (parts of characters).
    raw: Vec<u8>,
    pieces: Vec<Piece>,
    longest: usize,
    strips_first_space: bool,
    has_byte_tokens: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Piece {
    start: u32,
    len: u32,
    kind: Kind,
    special: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Kind {
    #[default]
    Absent,
    Text,
    Raw,
    Byte,
}

/// One token's content, as [`TokenTable::get`] finds it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Content<'a> {
    /// Complete characters.
    Text(&'a str),
    /// Bytes that begin or end within a character.
    Raw(&'a [u8]),
    /// One byte of a run of such tokens (`<0x0A>`), which is text only as a whole: SentencePiece's fallback for characters
    /// that its vocabulary lacks.
    Byte(u8),
}

impl TokenTable {
    /// Builds a table from (id, bytes, special) entries, in any order; a later entry for an id replaces an earlier one.
    ///
    /// # Errors
    /// [`TokenizerError::Vocabulary`] when an id exceeds [`MAX_TOKEN_ID`] or the pieces exceed 4 GiB.
    pub fn from_pieces(entries: Vec<PieceEntry>) -> Result<Self, TokenizerError> {
        let mut table = Self::default();
        for (id, bytes, special) in entries {
            table.insert(id, &bytes, special)?;
        }
        Ok(table)
    }

    /// The same table for a decoder that drops one space at the start of a whole text (SentencePiece's dummy prefix).
    #[must_use]
    pub fn stripping_first_space(mut self, strips: bool) -> Self {
        self.strips_first_space = strips;
        self
    }

    /// The same table, in which these ids are single bytes of a `ByteFallback` decoder.
    #[must_use]
    pub fn with_byte_tokens(mut self, tokens: impl IntoIterator<Item = (u32, u8)>) -> Self {
        for (id, byte) in tokens {
            if let Some(piece) = self
                .pieces
                .get_mut(id as usize)
                .filter(|piece| piece.kind != Kind::Absent)
            {
                (piece.start, piece.len, piece.kind) = (self.raw.len() as u32, 1, Kind::Byte);
                self.raw.push(byte);
                self.has_byte_tokens = true;
            }
        }
        self
    }

    fn insert(&mut self, id: u32, bytes: &[u8], special: bool) -> Result<(), TokenizerError> {
        if id > MAX_TOKEN_ID {
            return Err(TokenizerError::Vocabulary(format!(
                "token id {id} exceeds the limit of {MAX_TOKEN_ID}"
            )));
        }
        let index = id as usize;
        if self.pieces.len() <= index {
            self.pieces.resize(index + 1, Piece::default());
        }
        let (start, kind) = match std::str::from_utf8(bytes) {
            Ok(text) => {
                self.text.push_str(text);
                (self.text.len() - text.len(), Kind::Text)
            }
            Err(_) => {
                self.raw.extend_from_slice(bytes);
                (self.raw.len() - bytes.len(), Kind::Raw)
            }
        };
        let too_large = |_| TokenizerError::Vocabulary("the token pieces exceed 4 GiB".to_owned());
        self.pieces[index] = Piece {
            start: u32::try_from(start).map_err(too_large)?,
            len: u32::try_from(bytes.len()).map_err(too_large)?,
            kind,
            special,
        };
        self.longest = self.longest.max(bytes.len());
        Ok(())
    }

    /// The content of `id`, and whether it is special; `None` for an id the vocabulary lacks.
    #[inline]
    #[must_use]
    pub fn get(&self, id: u32) -> Option<(Content<'_>, bool)> {
        let piece = self.pieces.get(id as usize)?;
        let range = piece.start as usize..piece.start as usize + piece.len as usize;
        let content = match piece.kind {
            Kind::Absent => return None,
            Kind::Text => Content::Text(self.text.get(range)?),
            Kind::Raw => Content::Raw(self.raw.get(range)?),
            Kind::Byte => Content::Byte(*self.raw.get(range.start)?),
        };
        Some((content, piece.special))
    }

    /// The bytes of `id` (not necessarily complete UTF-8); of a special token, its content.
    #[must_use]
    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        let piece = self.pieces.get(id as usize)?;
        let range = piece.start as usize..piece.start as usize + piece.len as usize;
        match piece.kind {
            Kind::Absent => None,
            Kind::Text => self.text.as_bytes().get(range),
            Kind::Raw | Kind::Byte => self.raw.get(range),
        }
    }

    /// Whether `id` is special. An id the vocabulary lacks isn't.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.get(id as usize).is_some_and(|piece| piece.special)
    }

    /// One more than the largest id; not the number of tokens when ids are sparse.
    #[must_use]
    pub fn id_limit(&self) -> usize {
        self.pieces.len()
    }

    /// Length of the longest piece, in bytes.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Whether runs of some tokens are text only as a whole.
    #[must_use]
    pub fn has_byte_tokens(&self) -> bool {
        self.has_byte_tokens
    }

    /// Whether one space at the start of a whole text is dropped.
    #[must_use]
    pub fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

/// The GPT-2 byte-level alphabet: the character that stands for `byte` in a vocabulary.
#[must_use]
pub fn byte_to_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    // The others, in order, are U+0100 upwards.
    let rank = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(0x100 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The reverse of [`byte_to_char`], as a table.
pub(crate) struct ByteAlphabet {
    bytes: [Option<u8>; 0x180],
}

impl ByteAlphabet {
    pub(crate) fn new() -> Self {
        let mut bytes = [None; 0x180];
        for byte in 0..=255u8 {
            bytes[byte_to_char(byte) as usize] = Some(byte);
        }
        Self { bytes }
    }

    /// The bytes a spelling stands for; `None` when a character is outside the alphabet.
    pub(crate) fn bytes_of(&self, spelling: &str) -> Option<Vec<u8>> {
        spelling
            .chars()
            .map(|c| self.bytes.get(c as usize).copied().flatten())
            .collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_the_gpt2_one_and_reversible() {
        assert_eq!(byte_to_char(b' '), 'Ġ');
        assert_eq!(byte_to_char(b'\n'), 'Ċ');
        assert_eq!(byte_to_char(0xAD), 'Ń');
        let alphabet = ByteAlphabet::new();
        for byte in 0..=255u8 {
            assert_eq!(alphabet.bytes_of(&byte_to_char(byte).to_string()), Some(vec![byte]));
        }
        assert_eq!(alphabet.bytes_of("a b"), None);
    }

    #[test]
    fn sparse_ids_have_no_piece_and_huge_ids_are_refused() {
        let table = TokenTable::from_pieces(vec![(900, b"<eos>".to_vec(), true), (3, vec![0xC3], false)]).unwrap();
        assert_eq!(table.id_limit(), 901);
        assert_eq!(table.get(4), None);
        assert_eq!(table.get(901), None);
        assert_eq!(table.get(3), Some((Content::Raw(&[0xC3]), false)));
        assert_eq!(table.get(900), Some((Content::Text("<eos>"), true)));
        assert!(TokenTable::from_pieces(vec![(u32::MAX, vec![], false)]).is_err());
    }
}
