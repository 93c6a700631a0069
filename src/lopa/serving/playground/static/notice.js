// A message about an error, with a button for what can be done.

import { $, h } from "./dom.js";
import { recovery } from "./api.js";

export class Notice {
  constructor(root) {
    this.root = root;
    this.waiting = null;
  }

  clear() {
    this.waiting?.abort();
    this.root.hidden = true;
    this.root.replaceChildren();
  }

  // action: {label, run}, offered as a button.
  show(message, { kind = "error", action = null } = {}) {
    this.waiting?.abort();
    this.root.hidden = false;
    this.root.dataset.kind = kind;
    const button =
      action && h("button", { type: "button", class: "quiet", onclick: action.run }, action.label);
    const close = h(
      "button",
      { type: "button", class: "icon", "aria-label": "Dismiss", onclick: () => this.clear() },
      "×",
    );
    this.root.replaceChildren(h("p", {}, message), ...(button ? [button] : []), close);
  }

  // Show an error of the server, and wait for a server that is gone. kept: what remains.
  async failed(error, { kept = "", again = null } = {}) {
    const action = again && { label: "Run again", run: again };
    if (error.status === 401) {
      this.show("This server needs an API key: enter it under Settings, then run again.", { action });
      $("#api-key")?.closest("details")?.setAttribute("open", "");
      $("#api-key")?.focus();
    } else if (error.status === 429) {
      const when = error.retryAfter ? ` in ${error.retryAfter} s` : " in a moment";
      this.show(`The server is busy: ${error.message} Try again${when}.`, { action });
    } else if (error.lost) {
      this.show(`${error.message} ${kept}Waiting for the server to come back …`);
      this.waiting = new AbortController();
      const { signal } = this.waiting;
      try {
        await recovery(signal);
        this.show("The server is back.", { kind: "good", action });
      } catch (stopped) {
        if (!signal.aborted) throw stopped;
      }
    } else {
      this.show(error.message, { action });
    }
  }
}

