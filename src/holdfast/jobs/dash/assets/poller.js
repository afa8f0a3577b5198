// Polling of the server: one request at a time, none while the page is hidden, and slower after failures.

const SLOWEST_MS = 15000;
let skewMs = 0; // of the server's clock, which differs if the page comes through ssh
let numFailing = 0;

/** Return the server's time in seconds since 1970. */
export function serverNow() {
  return (Date.now() + skewMs) / 1000;
}

/** Error of a response, with its status; `final` if asking again is useless. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function get(path, tag, signal) {
  const headers = tag ? { "If-None-Match": tag } : {};
  const response = await fetch(path, { headers, cache: "no-store", credentials: "same-origin", signal });
  const date = Date.parse(response.headers.get("Date") ?? "");
  if (!Number.isNaN(date) && Math.abs(date - Date.now() - skewMs) > 2000) skewMs = date - Date.now();
  if (response.status === 304) return [null, tag];
  if (response.ok) return [await response.json(), response.headers.get("ETag")];
  const isJson = (response.headers.get("Content-Type") ?? "").startsWith("application/json");
  throw new Refused(response.status, isJson ? (await response.json()).error : await response.text());
}

/** Poller of one path. `onValue` is called with each new value, `onError` with what the server refuses. */
export class Poller {
  constructor(pathOf, everyMs, onValue, onError) {
    Object.assign(this, { pathOf, everyMs, onValue, onError });
    [this.tag, this.timer, this.request, this.isStopped, this.isFailing, this.pauseMs] = [null, null, null, false, false, everyMs];
    this.onVisible = () => {
      if (!document.hidden) this.soon();
    };
    document.addEventListener("visibilitychange", this.onVisible);
    this.soon();
  }

  /** Ask at once, with a path that may have changed. */
  soon() {
    if (this.isStopped) return;
    clearTimeout(this.timer);
    if (this.request === null) this.ask();
    else this.isAgain = true;
  }

  /** Forget the version of the value, since the path has another meaning now. */
  restart() {
    this.tag = null;
    this.request?.abort();
    this.soon();
  }

  stop() {
    this.isStopped = true;
    clearTimeout(this.timer);
    this.request?.abort();
    this.setFailing(false);
    document.removeEventListener("visibilitychange", this.onVisible);
  }

  async ask() {
    const own = (this.request = new AbortController());
    this.isAgain = false;
    try {
      const [value, tag] = await get(this.pathOf(), this.tag, own.signal);
      if (own.signal.aborted) return;
      this.tag = tag;
      this.setFailing(false);
      this.pauseMs = this.everyMs;
      if (value !== null) this.onValue(value);
    } catch (error) {
      if (own.signal.aborted) return;
      this.pauseMs = Math.min(2 * this.pauseMs, SLOWEST_MS);
      if (error instanceof Refused && error.status !== 403) {
        this.setFailing(false);
        this.onError?.(error);
      } else {
        this.setFailing(true, error);
      }
    } finally {
      this.request = null;
      if (this.isAgain) this.soon();
      else if (!this.isStopped && !document.hidden) this.timer = setTimeout(() => this.ask(), this.pauseMs);
    }
  }

  setFailing(isFailing, error = null) {
    if (isFailing !== this.isFailing) {
      numFailing += isFailing ? 1 : -1;
      this.isFailing = isFailing;
    }
    const isForbidden = error instanceof Refused;
    const text = isForbidden
      ? "This page belongs to a server that has ended. Open the URL that holdfast dash has printed last."
      : "The server does not answer. The page asks again.";
    const place = document.getElementById("connection");
    const shown = numFailing === 0 ? "" : isFailing ? text : place.textContent;
    if (place.textContent !== shown) place.textContent = shown;
  }
}
