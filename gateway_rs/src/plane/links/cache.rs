//! The link to the cache: "what do we already have?" One `Lookup` stream.
//!
//! The cache being away is never an error of a request: an ask then gets [`Found::Nothing`] at once and the request goes on.

use std::{
    collections::HashMap,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{channel, Backoff, Outbox, MAX_MESSAGE_BYTES};
use crate::plane::tls::Tls;
use crate::proto::{
    cache_service_client::CacheServiceClient,
    lookup_request::{Ask, Fill},
    lookup_response::{reply::What, Reply},
    Answer, LookupRequest, TraceContext,
};

/// This router's side of the `Lookup` stream.
pub struct Cache {
    address: String,
    tls: Option<Arc<Tls>>,
    outbox: Arc<Outbox<LookupRequest>>,
    next_ask: AtomicU64,
    /// None while there is no connection.
    asks: Mutex<Option<HashMap<u64, oneshot::Sender<Found>>>>,
}

/// What the cache knows.
pub enum Found {
    /// The answer.
    Hit(Answer),
    /// Nobody has it: generate it, then fill or abandon.
    Lead(Lead),
    /// The cache cannot be asked.
    Nothing,
}

/// The duty to fill a key. Dropping it abandons.
pub struct Lead {
    cache: Arc<Cache>,
    ask: u64,
    filled: bool,
}

impl Cache {
    /// Starts the link.
    pub fn start(address: String, tls: Option<Arc<Tls>>) -> Arc<Self> {
        let cache = Arc::new(Self {
            address,
            tls,
            outbox: Arc::new(Outbox::default()),
            next_ask: AtomicU64::new(1),
            asks: Mutex::new(None),
        });
        tokio::spawn(cache.clone().keep());
        cache
    }

    /// Asks for that key; waits while another request generates it. Dropping the future withdraws the ask.
    pub async fn ask(self: &Arc<Self>, key: bytes::Bytes, traceparent: String) -> Found {
        let ask = self.next_ask.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        match self.asks.lock().as_mut() {
            Some(asks) => asks.insert(ask, sender),
            None => return Found::Nothing,
        };
        let trace = (!traceparent.is_empty()).then(|| TraceContext {
            traceparent,
            ..TraceContext::default()
        });
        self.outbox
            .add(128, |message| message.asks.push(Ask { ask, key, trace }));
        let mut withdrawal = Withdrawal {
            cache: self,
            ask,
            answered: false,
        };
        let found = receiver.await.unwrap_or(Found::Nothing);
        withdrawal.answered = true;
        found
    }

    async fn keep(self: Arc<Self>) {
        let mut backoff = Backoff::default();
        loop {
            if let Err(reason) = self.read(&mut backoff).await {
                crate::plane::log::warn(&format!("cache {}: {reason}", self.address));
            }
            // Those who wait go on without: their senders are dropped here.
            self.asks.lock().take();
            self.outbox.clear();
            backoff.wait().await;
        }
    }

    async fn read(self: &Arc<Self>, backoff: &mut Backoff) -> Result<(), String> {
        let channel = channel(&self.address, self.tls.as_ref()).map_err(|error| error.to_string())?;
        let mut client = CacheServiceClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        // An empty first message opens the stream on the server's side.
        let outgoing = self.outbox.open(|_| vec![LookupRequest::default()]);
        let mut responses = client
            .lookup(outgoing)
            .await
            .map_err(|status| status.to_string())?
            .into_inner();
        self.asks.lock().get_or_insert_with(HashMap::new);
        backoff.reset();
        while let Some(response) = responses.message().await.map_err(|status| status.to_string())? {
            for reply in response.replies {
                self.answer(reply);
            }
        }
        Err("the stream was closed".to_owned())
    }

    fn answer(self: &Arc<Self>, reply: Reply) {
        let sender = self.asks.lock().as_mut().and_then(|asks| asks.remove(&reply.ask));
        let found = match reply.what {
            Some(What::Hit(answer)) => Found::Hit(answer),
            Some(What::Lead(_)) => Found::Lead(Lead {
                cache: self.clone(),
                ask: reply.ask,
                filled: false,
            }),
            None => Found::Nothing,
        };
        // Nobody waits any more: a lead is abandoned by being dropped.
        if let Some(sender) = sender {
            let _ = sender.send(found);
        }
    }
}

struct Withdrawal<'a> {
    cache: &'a Arc<Cache>,
    ask: u64,
    answered: bool,
}

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        let waiting = |asks: &mut HashMap<u64, _>| asks.remove(&self.ask).is_some();
        if !self.answered && self.cache.asks.lock().as_mut().is_some_and(waiting) {
            self.cache.outbox.add(8, |message| message.withdrawals.push(self.ask));
        }
    }
}

impl Lead {
    /// The answer is finished: it may be given again.
    pub fn fill(mut self, answer: Answer) {
        self.filled = true;
        let bytes = 64 + answer.choices.iter().map(|choice| choice.ids.len() * 4).sum::<usize>();
        let fill = Fill {
            ask: self.ask,
            answer: Some(answer),
        };
        self.cache.outbox.add(bytes, |message| message.fills.push(fill));
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        if !self.filled {
            self.cache.outbox.add(8, |message| message.abandons.push(self.ask));
        }
    }
}
