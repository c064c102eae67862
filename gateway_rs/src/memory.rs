//! The extension's own allocator, and when it gives memory back to the system.
//!
//! A router's requests are small blocks that one thread makes and another drops: what the C library's allocator is worst
//! at. Python keeps its own.

#[cfg(feature = "extension-module")]
mod own {
    use std::ffi::{c_int, c_long};

    use libmimalloc_sys::{mi_collect, mi_option_set_default};

    #[global_allocator]
    static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

    /// `mi_option_purge_delay` of mimalloc 3.
    const PURGE_DELAY: c_int = 15;
    /// Long enough for a prompt's buffers to be used again by the next one; mimalloc's own second keeps what a burst of
    /// connections needed for as long as there is any traffic.
    const PURGE_DELAY_MS: c_long = 100;

    #[allow(unsafe_code)]
    pub fn set_up() {
        // SAFETY: sets a number (unless the environment has), and may be called at any time.
        unsafe { mi_option_set_default(PURGE_DELAY, PURGE_DELAY_MS) }
    }

    #[allow(unsafe_code)]
    pub fn tidy() {
        // SAFETY: touches nothing but free memory, and may be called at any time.
        unsafe { mi_collect(false) }
    }

    #[allow(unsafe_code)]
    pub fn give_back() {
        // SAFETY: touches nothing but free memory, and may be called at any time.
        unsafe { mi_collect(true) }
    }
}

/// How soon what is free goes back to the system.
pub fn set_up() {
    #[cfg(feature = "extension-module")]
    own::set_up();
}

/// Gives back what has long been free, whoever freed it. To be called now and then: the allocator looks at that only when it
/// runs short, so that what a burst has left would stay for as long as nothing comes after it.
pub fn tidy() {
    #[cfg(feature = "extension-module")]
    own::tidy();
}

/// Gives back at once what this thread has freed: after work that needed much more than it keeps.
pub fn give_back() {
    #[cfg(feature = "extension-module")]
    own::give_back();
}
