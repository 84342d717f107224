// The run's live view from server-sent events and patches. It reconnects while the page is open.

const COLUMNS = ["steps", "times", "values"];
const RETRY_MILLISECONDS = 3000;

export class Stream {
  // `changed(view, names)` is called with the whole view and the names of the fields that changed;
  // `connection(state)` with "live", "lost" or "over".
  constructor(changed, connection) {
    this.changed = changed;
    this.connection = connection;
    this.view = null;
    this.clockAhead = 0; // how far the server's clock is ahead of this machine's clock, in seconds
    this.coordinated = false; // whether the coordinator itself serves this page
    this.lostAt = null; // when the connection was lost, by the server's clock; null while connected
    this.open();
  }

  open() {
    const source = new EventSource("/api/stream");
    source.addEventListener("view", (event) => {
      this.view = this.read(event);
      this.lostAt = null;
      this.connection("live");
      this.changed(this.view, new Set(Object.keys(this.view)));
    });
    source.addEventListener("patch", (event) => {
      const patch = this.read(event);
      this.view = applyPatch(this.view, patch);
      this.changed(this.view, new Set(Object.keys(patch)));
    });
    source.addEventListener("end", () => this.again(source, "over"));
    source.addEventListener("error", () => this.again(source, "lost"));
  }

  // Browsers stop retrying after an answer that is not a stream, such as "too many open pages".
  again(source, state) {
    source.close();
    this.lostAt ??= this.now();
    this.connection(state);
    setTimeout(() => this.open(), RETRY_MILLISECONDS);
  }

  read(event) {
    const { now, coordinated, view } = JSON.parse(event.data);
    this.coordinated = coordinated;
    this.clockAhead = now - Date.now() / 1000;
    return view;
  }

  now() {
    return Date.now() / 1000 + this.clockAhead;
  }
}

// Applies a patch of `make_patch` in node/dashboard/feed.py. Tests have the same as `apply_patch`.
export function applyPatch(before, patch) {
  const after = { ...before };
  for (const [name, value] of Object.entries(patch)) {
    if (value !== null && typeof value === "object" && "keep" in value) {
      const old = before[name];
      after[name] = { stride: old.stride };
      for (const column of COLUMNS) after[name][column] = [...old[column].slice(0, value.keep), ...value[column]];
    } else {
      after[name] = value;
    }
  }
  return after;
}
