// Which round is shown. Follows a live run until the user moves or plays.

import { setAttribute, setText } from "./dom.js";

export class Player {
  // elements: by id, those of the view. label: shows the round. show(round, moving) renders.
  constructor(elements, label, show) {
    this.elements = {
      back: elements["step-back"],
      play: elements["play"],
      forward: elements["step-forward"],
      first: elements["to-first"],
      last: elements["to-last"],
      scrubber: elements["scrubber"],
      speed: elements["speed"],
      label,
    };
    this.render = show;
    this.times = [0]; // by tick: seconds from the start, for playing in real time
    this.total = 0;
    this.shown = 0;
    this.playing = false;
    this.following = false; // stays with the newest round of a live run
    this.live = false;
    this.describe = (tick, total) => `round ${tick} of ${total}`;
    const { back, play, forward, first, last, scrubber } = this.elements;
    play.addEventListener("click", () => this.toggle());
    back.addEventListener("click", () => this.step(-1));
    forward.addEventListener("click", () => this.step(1));
    first.addEventListener("click", () => this.go(0));
    last.addEventListener("click", () => this.go(this.total));
    scrubber.addEventListener("input", () => this.go(Number(scrubber.value)));
    this.#controls();
  }

  reset(live = false) {
    this.pause();
    this.live = this.following = live;
    this.total = this.shown = 0;
    this.times = [0];
    this.#controls();
  }

  // There are `total` ticks now; `times` in seconds by tick.
  extend(total, times) {
    this.total = total;
    this.times = times;
    if (this.following) this.#frame();
    else this.#controls();
  }

  end() {
    this.live = false;
    if (this.following) this.#show(this.total);
    this.following = false;
    this.#controls();
  }

  go(tick) {
    this.pause();
    this.#show(tick);
    this.following = this.live && this.shown === this.total;
  }

  step(by) {
    this.go(this.shown + by);
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (!this.total) return;
    this.following = false;
    if (this.shown >= this.total && !this.live) this.#show(0);
    this.playing = true;
    this.due = null;
    this.#frame();
    this.#controls();
  }

  pause() {
    this.playing = false;
    this.#controls();
  }

  #frame() {
    if (this.requested) return;
    this.requested = requestAnimationFrame((now) => {
      this.requested = 0;
      if (this.following) this.#show(this.total, true);
      if (this.playing) this.#advance(now);
    });
  }

  #advance(now) {
    this.due ??= now + this.#wait();
    let tick = this.shown;
    while (now >= this.due && tick < this.total) {
      tick++;
      this.due += this.#wait(tick);
    }
    if (tick !== this.shown) this.#show(tick, tick < this.total);
    if (tick >= this.total && this.live) this.following = true;
    if (tick >= this.total) this.pause();
    else this.#frame();
  }

  // Milliseconds from one tick to the next.
  #wait(tick = this.shown) {
    const speed = this.elements.speed.value;
    if (speed !== "time") return 1000 / Number(speed);
    return 1000 * Math.max((this.times[tick + 1] ?? 0) - (this.times[tick] ?? 0), 0.001);
  }

  // moving: another tick follows soon, so parts may be rendered later.
  #show(tick, moving = false) {
    this.shown = Math.min(Math.max(tick, 0), this.total);
    this.render(this.shown, moving);
    this.#controls();
  }

  #controls() {
    const { back, play, forward, first, last, scrubber, label } = this.elements;
    const none = !this.total;
    for (const element of [back, play, forward, first, last, scrubber]) {
      if (element.disabled !== none) element.disabled = none;
    }
    setAttribute(scrubber, "max", Math.max(this.total, 1));
    scrubber.value = this.shown;
    const text = none ? "–" : this.describe(this.shown, this.total);
    setAttribute(scrubber, "aria-valuetext", text);
    setText(label, text + (this.live && !none ? (this.following ? " · live" : " · behind") : ""));
    setAttribute(play, "aria-label", this.playing ? "Pause" : "Play");
    setAttribute(play, "data-playing", this.playing ? "yes" : null);
  }
}

// Keys of a player, except in inputs and in the grid.
export function playerKeys(player, visible) {
  document.addEventListener("keydown", (event) => {
    if (!visible() || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest("input, textarea, select, [role=tablist], dialog")) return;
    const onButton = event.target.closest("button, summary, a");
    const keys = {
      ArrowLeft: () => player.step(-1),
      ArrowRight: () => player.step(1),
      Home: () => player.go(0),
      End: () => player.go(player.total),
      k: () => player.toggle(),
    };
    if (!onButton) keys[" "] = () => player.toggle();
    if (!(event.key in keys) || !player.total) return;
    event.preventDefault();
    keys[event.key]();
  });
}
