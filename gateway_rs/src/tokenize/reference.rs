//! The reference: Hugging Face `tokenizers`, which loads every `tokenizer.json`.
//!
//! It answers for the models our own encoder doesn't accept, and is the oracle that it is checked against at load.

use tokenizers::{AddedVocabulary, Model, OffsetType, PostProcessorWrapper, PreTokenizer};

use super::TokenizerError;

/// A loaded `tokenizer.json`, reduced to what maps texts to ids and ids to text.
pub(crate) struct Reference {
    inner: tokenizers::Tokenizer,
    /// The added tokens for text from users: special ones are not recognised.
    plain_added: AddedVocabulary,
}

impl Reference {
    /// Loads the bytes of a `tokenizer.json`. Truncation, padding and the post-processor are dropped: they belong to
    /// training pipelines, and a server must never shorten a prompt by itself.
    pub(crate) fn from_bytes(json: &[u8]) -> Result<Self, TokenizerError> {
        let invalid = |error: tokenizers::Error| TokenizerError::Invalid(error.to_string());
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(invalid)?;
        inner.with_truncation(None).map_err(invalid)?;
        inner.with_padding(None);
        inner.with_post_processor(None::<PostProcessorWrapper>);
        let mut plain_added = inner.get_added_vocabulary().clone();
        plain_added.set_encode_special_tokens(true);
        let reference = Self { inner, plain_added };
        // Found here rather than in a request: a model without a token for what it doesn't know fails on such a text.
        reference
            .encode("\u{10FFFF} \0x", true)
            .map_err(|error| TokenizerError::Vocabulary(format!("unknown characters can't be encoded: {error}")))?;
        Ok(reference)
    }

    /// The ids of `text`; with `specials`, special tokens written in the text are recognised.
    pub(crate) fn encode(&self, text: &str, specials: bool) -> Result<Vec<u32>, String> {
        let encoding = if specials {
            self.inner.encode_fast(text, false)
        } else {
            self.encode_plain(text)
        };
        encoding
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| error.to_string())
    }

    /// `encode` step by step, since the reference makes recognising specials a setting of the whole tokenizer.
    fn encode_plain(&self, text: &str) -> tokenizers::Result<tokenizers::Encoding> {
        let mut pieces = self
            .plain_added
            .extract_and_normalize(self.inner.get_normalizer(), text);
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.inner.get_model().tokenize(piece.get()))?;
        pieces.into_encoding(None, 0, OffsetType::None)
    }

    /// The text of `ids`, by the model's own decoder.
    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, String> {
        self.inner.decode(ids, skip_special).map_err(|error| error.to_string())
    }

    /// Every (spelling, id) of the vocabulary, added tokens included, in no order.
    pub(crate) fn spellings(&self) -> Vec<(String, u32)> {
        self.inner.get_vocab(true).into_iter().collect()
    }

    /// How `id` is spelled for decoding (a normalized added token by its normalized content).
    pub(crate) fn spelling(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Whether a spelling is a special token's, which decoding skips.
    pub(crate) fn is_special(&self, spelling: &str) -> bool {
        self.inner.get_added_vocabulary().is_special_token(spelling)
    }

    /// The added tokens with the ids the reference gave them (a file's own ids are only hints).
    pub(crate) fn added_tokens(&self) -> Vec<(u32, tokenizers::AddedToken)> {
        self.inner
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .iter()
            .map(|(id, token)| (*id, token.clone()))
            .collect()
    }
}
