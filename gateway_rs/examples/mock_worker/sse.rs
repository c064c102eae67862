//! The mock's other door: OpenAI's stream over plain HTTP, straight to the client.
//!
//! It is the floor of what any relay adds to (one write for each id and client, no other process), and the backend of
//! gateways that forward HTTP. Everything it says is made beforehand.

use std::{io, sync::Arc};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

use super::{now_ns, steps, Mock, Pace};

const MAX_REQUEST_BYTES: usize = 16 * 1024 * 1024;
const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n\
                    transfer-encoding: chunked\r\n\r\n";

/// One request under way.
struct Playing {
    socket: Arc<TcpStream>,
    pieces: Arc<Pieces>,
    seed: u64,
    sent: u32,
    max_tokens: u32,
}

/// What is written, as HTTP chunks.
struct Pieces {
    first: Vec<u8>,
    token: Vec<u8>,
    last: Vec<u8>,
    about: Vec<u8>,
}

impl Pieces {
    fn new(model: &str, mark: &str) -> Self {
        let event = |delta: &str, finish: &str| {
            format!(
                "data: {{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\
                 \"created\":1700000000,\"model\":\"{model}\",\"choices\":[{{\"index\":0,\"delta\":{{{delta}}},\
                 \"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
            )
        };
        let chunk = |text: String| format!("{:x}\r\n{text}\r\n", text.len());
        let role = chunk(event("\"role\":\"assistant\",\"content\":\"\"", "null"));
        let last = chunk(event("", "\"length\"") + "data: [DONE]\n\n") + "0\r\n\r\n";
        Self {
            first: (HEAD.to_owned() + &role).into_bytes(),
            token: chunk(event(&format!("\"content\":\"{mark}\""), "null")).into_bytes(),
            last: last.into_bytes(),
            about: about(model),
        }
    }
}

/// The answer to whatever a gateway asks about a server: health, models, information.
fn about(model: &str) -> Vec<u8> {
    let body = serde_json::json!({
        "object": "list",
        "data": [{"id": model, "object": "model", "created": 1, "owned_by": "mock", "root": model, "max_model_len": 8192}],
        "version": "0.11.0", "model_path": model, "served_model_name": model, "model_id": model, "tokenizer_path": "",
        "is_generation": true, "max_total_num_tokens": 1_000_000, "max_req_input_len": 100_000, "tp_size": 1,
        "dp_size": 1, "internal_states": [{}], "weight_version": "default", "model_type": "llama",
        "has_image_understanding": false, "has_audio_understanding": false, "architectures": ["LlamaForCausalLM"],
    })
    .to_string();
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

/// Takes connections for as long as the process lives.
pub async fn serve(mock: Arc<Mock>, listener: TcpListener, mark: String) {
    let (submit, submitted) = mpsc::channel(4096);
    let pieces = Arc::new(Pieces::new(&mock.description.model, &mark));
    tokio::spawn(steps::play(mock.clone(), submitted));
    while let Ok((socket, _)) = listener.accept().await {
        // A broken connection is its client's affair.
        tokio::spawn(read(mock.clone(), socket, submit.clone(), pieces.clone()));
    }
}

/// One connection's requests, until it is closed.
async fn read(
    mock: Arc<Mock>,
    socket: TcpStream,
    submit: mpsc::Sender<Playing>,
    pieces: Arc<Pieces>,
) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let socket = Arc::new(socket);
    let mut buffer = Vec::with_capacity(16 * 1024);
    loop {
        socket.readable().await?;
        match socket.try_read_buf(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        while let Some(end) = request_end(&buffer) {
            if end > MAX_REQUEST_BYTES {
                return Ok(());
            }
            if buffer.len() < end {
                break;
            }
            let request: Vec<u8> = buffer.drain(..end).collect();
            if !request.starts_with(b"POST") {
                write(&socket, &pieces.about).await?;
                continue;
            }
            let seed = number_after(&request, b"\"seed\":").unwrap_or_default();
            mock.log.lock().requests.entry(seed).or_default().received_ns = now_ns();
            let playing = Playing {
                socket: socket.clone(),
                pieces: pieces.clone(),
                seed,
                sent: 0,
                max_tokens: number_after(&request, b"\"max_tokens\":").unwrap_or(16).max(1) as u32,
            };
            if submit.send(playing).await.is_err() {
                return Ok(());
            }
        }
    }
}

impl steps::Playing for Playing {
    async fn step(&mut self, mock: &Mock, pace: Pace) -> bool {
        let tokens = pace.tokens_per_frame.min(self.max_tokens - self.sent);
        let mut bytes = Vec::with_capacity(1024);
        if self.sent == 0 {
            bytes.extend_from_slice(&self.pieces.first);
        }
        (0..tokens).for_each(|_| bytes.extend_from_slice(&self.pieces.token));
        self.sent += tokens;
        let more = self.sent < self.max_tokens;
        if !more {
            bytes.extend_from_slice(&self.pieces.last);
        }
        mock.log.lock().stamp(self.seed, tokens as usize, now_ns());
        write(&self.socket, &bytes).await.is_ok() && more
    }
}

async fn write(socket: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match socket.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => socket.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Where the first request ends, as far as its head is there.
fn request_end(buffer: &[u8]) -> Option<usize> {
    let head = buffer.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let lower = buffer[..head].to_ascii_lowercase();
    Some(head + number_after(&lower, b"content-length:").unwrap_or(0) as usize)
}

/// The number that follows the last place of that text. (A prompt may have it too; the client's fields come after.)
fn number_after(text: &[u8], key: &[u8]) -> Option<u64> {
    let at = text.windows(key.len()).rposition(|window| window == key)? + key.len();
    let digits = text[at..].iter().skip_while(|byte| **byte == b' ');
    let digits: String = digits
        .take_while(|byte| byte.is_ascii_digit())
        .map(|byte| char::from(*byte))
        .collect();
    digits.parse().ok()
}
