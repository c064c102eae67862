//! The first bytes of a connection, which show what protocol it is: until they have come no other timer runs.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};
use tonic::transport::server::Connected;

/// How every HTTP/2 connection begins.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A client's connection, which ends with an error when the client is slow to begin.
pub struct Opening<S> {
    stream: S,
    /// Bytes of the preface that have come.
    seen: usize,
    /// None once it is known to be HTTP/2, or not to be.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> Opening<S> {
    /// The client has so long.
    pub fn new(stream: S, timeout: Duration) -> Self {
        Self {
            stream,
            seen: 0,
            timer: Some(Box::pin(tokio::time::sleep(timeout))),
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        let owed = &PREFACE[self.seen..];
        let begun = bytes.len() >= owed.len() || !owed.starts_with(bytes);
        self.seen += bytes.len().min(owed.len());
        if begun {
            self.timer = None;
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Opening<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let Some(timer) = &mut self.timer else { return read };
        if read.is_ready() {
            self.take(&buffer.filled()[before..]);
        } else if timer.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Opening<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S: Connected> Connected for Opening<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::{duplex, AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(20);

    /// What is read of a client that says these parts and then nothing, before the connection ends with an error; None
    /// when it stays open.
    async fn read(parts: &[&[u8]]) -> Option<Vec<u8>> {
        let (mut client, server) = duplex(64);
        let mut opening = Opening::new(server, TIMEOUT);
        let mut all = Vec::new();
        for part in parts {
            client.write_all(part).await.unwrap();
            let mut bytes = vec![0; part.len()];
            opening.read_exact(&mut bytes).await.unwrap();
            all.extend(bytes);
        }
        opening.timer.as_ref()?;
        let error = opening.read(&mut [0]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        Some(all)
    }

    #[tokio::test]
    async fn whoever_has_begun_has_time() {
        assert_eq!(read(&[b"G"]).await, None);
        assert_eq!(read(&[b"P", b"O"]).await, None);
        assert_eq!(read(&[PREFACE]).await, None);
        assert_eq!(read(&[&PREFACE[..7], &PREFACE[7..], b"more"]).await, None);
    }

    #[tokio::test]
    async fn whoever_has_not_is_let_go() {
        for parts in [vec![], vec![&b"P"[..]], vec![&PREFACE[..7], &PREFACE[7..23]]] {
            assert_eq!(read(&parts).await, Some(parts.concat()));
        }
    }
}
