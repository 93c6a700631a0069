// The page: three views, the theme, the address, files dropped anywhere.

import { request } from "./api.js";
import { forgetColours } from "./colour.js";
import { $, setText } from "./dom.js";
import { EngineView } from "./engine.js";
import { GenerateView } from "./generate.js";
import { Notice } from "./notice.js";
import { RaceView } from "./race.js";

const VIEWS = ["generate", "race", "engine"];

async function load() {
  const notice = new Notice($("#page-notice"));
  while (true) {
    try {
      const info = await (await request("playground/info")).json();
      notice.clear();
      return info;
    } catch (error) {
      notice.show(`${error.message} Trying again …`);
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

function address() {
  const [view, search] = location.hash.slice(1).split(/\?(.*)/s);
  return { view: VIEWS.includes(view) ? view : "generate", search: new URLSearchParams(search) };
}

async function main() {
  themes();
  const info = await load();
  setText($("#model-name"), info.model);
  $("#model-name").hidden = false;
  document.title = `${info.model} · LoPA playground`;

  const onaddress = () => {
    const view = current;
    const search = views[view].address?.();
    history.replaceState(null, "", `#${view}${search?.size ? `?${search}` : ""}`);
  };
  const views = {
    generate: new GenerateView($("#view-generate"), info, { onaddress }),
    race: new RaceView($("#view-race"), info, { onaddress }),
    engine: new EngineView($("#view-engine")),
  };
  let current = null;

  const show = (view) => {
    if (view === current) return;
    current = view;
    for (const name of VIEWS) {
      $(`#view-${name}`).hidden = name !== view;
      $(`#tab-${name}`).setAttribute("aria-selected", name === view);
      $(`#tab-${name}`).tabIndex = name === view ? 0 : -1;
    }
    if (view === "engine") views.engine.start();
    else views.engine.stop();
  };

  const follow = () => {
    const { view, search } = address();
    if (search.size) views[view].restore?.(search);
    show(view);
  };
  addEventListener("hashchange", follow);
  $(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the hash of the address belongs to the view
    $("#main").focus();
  });
  follow();

  for (const name of VIEWS) {
    $(`#tab-${name}`).addEventListener("click", () => {
      show(name);
      onaddress();
    });
  }
  $("[role=tablist]").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = VIEWS[(VIEWS.indexOf(current) + by + VIEWS.length) % VIEWS.length];
    show(next);
    onaddress();
    $(`#tab-${next}`).focus();
  });

  for (const button of document.querySelectorAll(".copy-link")) {
    button.addEventListener("click", async () => {
      onaddress();
      const label = button.textContent;
      try {
        await navigator.clipboard.writeText(location.href);
        setText(button, "Copied");
      } catch {
        setText(button, "See the address bar");
      }
      setTimeout(() => setText(button, label), 1500);
    });
  }

  drops(async (file) => {
    show("generate");
    await views.generate.openFile(file);
  });

  const repaint = () => {
    forgetColours();
    views.generate.repaint();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  document.addEventListener("lopa-theme", repaint);
  document.documentElement.dataset.ready = "yes";
}

function themes() {
  const select = $("#theme");
  select.value = document.documentElement.dataset.theme ?? "system";
  select.addEventListener("change", () => {
    if (select.value === "system") {
      delete document.documentElement.dataset.theme;
      localStorage.removeItem("lopa-theme");
    } else {
      document.documentElement.dataset.theme = select.value;
      localStorage.setItem("lopa-theme", select.value);
    }
    document.dispatchEvent(new Event("lopa-theme"));
  });
}

// A file dropped anywhere on the page.
function drops(open) {
  let depth = 0;
  const over = (on) => document.body.classList.toggle("dropping", on);
  addEventListener("dragenter", (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    depth++;
    over(true);
  });
  addEventListener("dragleave", () => {
    depth = Math.max(0, depth - 1);
    if (!depth) over(false);
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    over(false);
    const [file] = event.dataTransfer.files;
    if (file) open(file);
  });
}

main();
