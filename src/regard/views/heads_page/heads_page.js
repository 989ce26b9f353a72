"use strict";
headMaps(document.getElementById("heads"))(JSON.parse(document.getElementById("data").textContent));
