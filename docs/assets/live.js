// Makes the frame of a live figure as high as its section, which reports its height.
const MAX_HEIGHT = 1400; // pixels

addEventListener("message", ({ data, source }) => {
  if (!Number.isFinite(data?.regardHeight)) return;
  for (const frame of document.querySelectorAll(".live iframe")) {
    if (frame.contentWindow === source) frame.style.height = `${Math.min(data.regardHeight + 2, MAX_HEIGHT)}px`;
  }
});
