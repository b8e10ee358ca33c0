// Exists only to own the precompiled header that the other targets reuse.
