// Load the page of a frame when the frame comes into sight, not before.
(function () {
  "use strict";
  const load = frame => { frame.src = frame.dataset.src; };
  const frames = () => document.querySelectorAll("iframe.viewer[data-src]");
  if (!("IntersectionObserver" in window)) { frames().forEach(load); return; }
  const observer = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); load(entry.target); }
  }, { rootMargin: "200px" });
  frames().forEach(frame => observer.observe(frame));
})();
