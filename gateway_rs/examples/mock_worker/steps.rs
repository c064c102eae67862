//! Stepping answers that each have a way out of their own, as an engine steps its batch: what peers are measured against.

use std::{future::Future, sync::Arc, time::Instant};

use tokio::sync::mpsc;

use super::{Mock, Pace};

/// One answer under way.
pub trait Playing: Send + 'static {
    /// Sends its next ids; true when more are to come.
    fn step(&mut self, mock: &Mock, pace: Pace) -> impl Future<Output = bool> + Send;
}

/// Plays what is submitted, for as long as somebody submits.
pub async fn play<P: Playing>(mock: Arc<Mock>, mut submitted: mpsc::Receiver<P>) {
    let mut groups: Vec<Vec<P>> = Vec::new();
    let (mut count, mut joined, mut phase) = (0_usize, 0_usize, 0_usize);
    let mut due = Instant::now();
    loop {
        let pace = *mock.pace.lock();
        let every = pace.interval / pace.phases;
        groups.resize_with(groups.len().max(pace.phases as usize), Vec::new);
        let idle = count == 0;
        tokio::select! {
            biased;
            playing = submitted.recv() => {
                let Some(mut playing) = playing else { return };
                if playing.step(&mock, pace).await {
                    groups[joined % pace.phases as usize].push(playing);
                    joined += 1;
                    count += 1;
                }
            }
            () = tokio::time::sleep_until(due.into()), if count > 0 => {
                let phases = if pace.interval.is_zero() { 0..groups.len() } else { phase..phase + 1 };
                for group in &mut groups[phases] {
                    for mut playing in std::mem::take(group) {
                        match playing.step(&mock, pace).await {
                            true => group.push(playing),
                            false => count -= 1,
                        }
                    }
                }
                phase = (phase + 1) % pace.phases as usize;
                due += every;
            }
        }
        if idle {
            due = Instant::now() + every;
        }
    }
}
