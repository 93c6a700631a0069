// The scales: nine steps of confidence, fine where fills happen; nine steps from the first round
// to the last. The colours are in style.css.

const STEPS = [0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99];

export const LEVELS = STEPS.length + 1;
export const STEP_LABELS = [0, ...STEPS, 1];

export function confidenceLevel(p) {
  let level = 0;
  while (level < STEPS.length && p > STEPS[level]) level++;
  return level;
}

export function roundLevel(round, total) {
  return total <= 1 ? 0 : Math.round(((round - 1) / (total - 1)) * (LEVELS - 1));
}

// The confidence scale as a pixel for every byte of a landscape, in the current theme.
let table = null;

export function landscapeColours() {
  if (table) return table;
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    pixel.fillStyle = getComputedStyle(probe).color;
    pixel.fillRect(0, 0, 1, 1);
    const [r, g, b] = pixel.getImageData(0, 0, 1, 1).data;
    return (255 << 24) | (b << 16) | (g << 8) | r; // little-endian RGBA
  };
  const levels = Array.from({ length: LEVELS }, (_, level) => colour(`--h${level}`));
  table = {
    levels: Int32Array.from({ length: 256 }, (_, byte) => levels[confidenceLevel(byte / 255)]),
    filled: colour("--strip-filled"),
    ahead: colour("--ahead"),
    none: colour("--strip-none"),
  };
  probe.remove();
  return table;
}

export function forgetColours() {
  table = null;
}
